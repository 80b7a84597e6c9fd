// `npm install && node example.mjs "The capital of France is"`: a session, a stream, and a branch of it.

import { Room, StateroomError } from "./stateroom.mjs";

const room = await Room.connect("node-example");
const { session, length } = await room.ask("open", { text: process.argv[2] ?? "The capital of France is" });
console.log(`session of ${length} tokens`);

let text = "";
const done = await room.ask("decode", { session, max_tokens: 12, ignore_eos: true }, (reply) => {
  if (reply.kind === "token") text += reply.text;
});
console.log(JSON.stringify({ finish: done.finish, tokens: done.tokens, same: text === done.text }));

const forked = await room.ask("fork", { session, n: 2 });
const [one, two] = await Promise.all(
  forked.sessions.map((session) => room.ask("decode", { session, max_tokens: 6, ignore_eos: true, stream: false })),
);
console.log(JSON.stringify({ forks: [one.tokens, two.tokens] }));

try {
  await room.ask("decode", { session: "nobody's", max_tokens: 1 });
} catch (error) {
  if (!(error instanceof StateroomError)) throw error;
  console.log(JSON.stringify({ refused: error.code, field: error.field }));
}
for (const each of [session, ...forked.sessions]) await room.ask("close", { session: each });
room.close();
