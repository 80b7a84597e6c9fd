// A client of Stateroom's protocol, version 1, in Node.js. docs/protocol.md is all it was written from.

import { homedir } from "node:os";
import { join } from "node:path";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

export class StateroomError extends Error {
  constructor({ code, message, field = null, details = {} }) {
    super(message);
    Object.assign(this, { code, field, details });
  }
}

export function defaultEndpoint(env = process.env) {
  if (env.STATEROOM_ENDPOINT) return env.STATEROOM_ENDPOINT;
  const folder =
    env.STATEROOM_RUNTIME_DIR ||
    (env.XDG_RUNTIME_DIR ? join(env.XDG_RUNTIME_DIR, "stateroom") : join(homedir(), ".stateroom", "run"));
  return `ipc://${join(folder, "stateroom.sock")}`;
}

export class Room {
  #socket = new Dealer({ linger: 0 });
  #open = new Map(); // id → {onPart, resolve, reject, seq}
  #nextId = 1;

  static async connect(app, endpoint = defaultEndpoint()) {
    const room = new Room();
    room.#socket.connect(endpoint);
    room.#receive();
    room.server = await room.ask("hello", { app, client: "node-example" });
    return room;
  }

  // One request; resolves with its final reply. `onPart` sees the replies before it: tokens, progress, events.
  ask(op, args = {}, onPart = () => {}) {
    const id = this.#nextId++;
    const promise = new Promise((resolve, reject) => this.#open.set(id, { onPart, resolve, reject, seq: 0 }));
    promise.id = id;
    this.#socket.send(encode({ v: 1, id, op, ...args })).catch((error) => this.#open.get(id)?.reject(error));
    return promise;
  }

  close() {
    this.#socket.close();
    for (const { reject } of this.#open.values()) reject(new Error("closed"));
    this.#open.clear();
  }

  async #receive() {
    for await (const [frame] of this.#socket) {
      const reply = decode(frame);
      const request = this.#open.get(reply.id);
      if (!request) continue; // of one that was given up
      if (reply.seq !== request.seq++) {
        this.#open.delete(reply.id);
        request.reject(new Error(`a gap in the replies of request ${reply.id}`));
      } else if (!reply.final) {
        request.onPart(reply);
      } else {
        this.#open.delete(reply.id);
        if (reply.kind === "error") request.reject(new StateroomError(reply.error));
        else request.resolve(reply);
      }
    }
  }
}
