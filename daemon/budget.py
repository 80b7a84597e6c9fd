"""One budget of KV and who may hold how much of it, as workers come, want more, give way and die. Pure.

A worker may hold up to what it was told. It takes more at once, but needs a while to hold less: sessions move
to disk, and nothing in use is touched. So what a worker was asked to give back is free only once it says that
it is within it, and until then it counts as its own. What the workers may hold never comes to more than the
total, in whatever order messages arrive and workers die.

Who gets what. Whoever comes gets an equal share. What nobody wants is spread over all. Who is short gets what
is free, then what others were given and don't hold, then what others hold and don't use: below an equal share
only from those who haven't been short themselves for a while, and never below a quarter of it. So two that
both want everything come to rest at equal shares, and bytes don't go to and fro. Who isn't short but has idle
sessions give way is tight: it gets the same, what others hold only from those whom nobody used for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLOOR_PART = 4  # nobody is asked to go below this part of an equal share for another's sake
STEP_PART = 32  # the part of the total that moves at least, so that not every request is a message
TIGHT_PART = 8  # the part of the total that who is tight gets at a time
DUST_PART = 64  # less than this part of the total isn't worth a message
WANT_S = 10.0  # a want is forgotten after this: a request waits no longer for room
REST_S = 30.0  # who was short, or used, that lately keeps its equal share
TOLD_MAX = 2  # messages that a worker hasn't answered; more wait

Told = dict[int, int]  # the most KV to hold from now on, by worker


@dataclass(slots=True)
class Member:
    """A worker. Bytes."""

    held: int = 0  # KV on its device, by its last word
    busy: int = 0  # of that, in use
    target: int = 0  # what it was told last
    answered: int = 0  # what it said to be within last
    told: list[int] = field(default_factory=list)  # since then; each unlike the last, so answers name theirs
    ready: bool = False  # it takes messages
    new: bool = True  # has yet to get its equal share
    want: int = 0  # beyond its target, that others can spare
    asked: int = 0  # the same, whether they can or not
    need: int = 0  # the least of that which is of any use
    short_s: float = float("-inf")  # when it asked last
    tight_s: float = float("-inf")  # when sessions last gave way in it for want of room
    demoted: int = 0  # how many had until then
    lowered_s: float = float("-inf")  # when it was last asked for what it holds
    given_s: float = float("-inf")  # when it last got what it wanted, and may not hold it yet
    used_s: float = float("-inf")  # when it last had a request

    @property
    def bound(self) -> int:
        """The most that it may hold now."""
        return max(self.answered, *self.told) if self.told else self.answered

    @property
    def coming(self) -> int:
        """What it will give back."""
        return self.bound - self.target


class KvBudget:
    """Grants of one total, which may change. `settle` says what to tell whom after anything happened."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._members: dict[int, Member] = {}

    # ------------------------------------------------------------ what happens

    def join(self, who: int) -> None:
        """A worker is being started; its share is kept for it from now on. It begins with a budget of 0."""
        assert who not in self._members
        self._members[who] = Member()

    def ready(self, who: int) -> int:
        """It takes messages. The first is this, to be sent before anything else."""
        member = self._members[who]
        member.ready = True
        member.told.append(member.target)
        return member.target

    def leave(self, who: int) -> None:
        """Its process is no more, and what it held is free."""
        self._members.pop(who, None)

    def holds(self, who: int, held: int, busy: int, demoted: int, used_s: float, now_s: float) -> None:
        """A pulse: what it holds, and has in use; how many sessions gave way; when it last had a request."""
        member = self._members.get(who)
        if member is not None:
            if demoted > member.demoted and now_s - member.lowered_s >= REST_S:
                member.tight_s = now_s
            member.held, member.busy, member.demoted, member.used_s = held, busy, demoted, used_s

    def short(self, who: int, nbytes: int, now_s: float) -> None:
        """A worker has a request that waits for so many bytes beyond its budget."""
        member = self._members.get(who)
        if member is not None:
            member.need, member.asked = nbytes, max(nbytes, self.total // STEP_PART)
            member.short_s = now_s

    def within(self, who: int, nbytes: int) -> None:
        """A worker holds no more than what it was told."""
        member = self._members.get(who)
        if member is not None and nbytes in member.told:
            del member.told[: member.told.index(nbytes) + 1]
            member.answered = nbytes

    # ------------------------------------------------------------ figures

    @property
    def share(self) -> int:
        """An equal share."""
        return self.total // max(len(self._members), 1)

    @property
    def most(self) -> int:
        """What one of them could come to be given, if the others rested."""
        return self.total - (len(self._members) - 1) * (self.share // FLOOR_PART)

    @property
    def bound(self) -> int:
        """What all may hold together."""
        return sum(member.bound for member in self._members.values())

    @property
    def granted(self) -> int:
        """What all were given together."""
        return sum(member.target for member in self._members.values())

    @property
    def held(self) -> int:
        return sum(member.held for member in self._members.values())

    def member(self, who: int) -> Member | None:
        return self._members.get(who)

    # ------------------------------------------------------------ what follows

    def settle(self, now_s: float) -> Told:
        """Moves what can be moved now, and gives what the workers are to be told."""
        before = {who: member.target for who, member in self._members.items()}
        self._shrink()
        self._want(now_s)
        self._take(now_s)
        self._give(now_s)
        self._spread()
        told: Told = {}
        for who, member in self._members.items():
            if not member.ready:
                member.answered = member.target  # nobody to ask: it holds nothing
            elif member.target != before[who]:
                if member.target < min(before[who], member.held):  # what gives way for that says nothing
                    member.lowered_s, member.tight_s = now_s, float("-inf")
                member.told.append(member.target)
                told[who] = member.target
        return told

    def _free(self) -> int:
        """What is nobody's; targets of this round counted as if they were told."""
        return self.total - sum(max(member.bound, member.target) for member in self._members.values())

    def _open(self) -> list[Member]:
        """Those that can be told something now."""
        return [member for member in self._members.values() if len(member.told) < TOLD_MAX]

    def _shrink(self) -> None:
        """To a total that fell: what isn't held goes first, then the same part of each."""
        self._lower(self.granted - self.total, {id(m): max(m.target - m.held, 0) for m in self._open()})
        over, granted = self.granted - self.total, max(self.granted, 1)
        self._lower(over, {id(m): -(-over * m.target // granted) for m in self._open()})

    def _lower(self, wanted: int, most: dict[int, int]) -> int:
        """Lowers targets by so much together, who can give most first; gives what is still wanted."""
        for member in sorted(self._open(), key=lambda member: -most.get(id(member), 0)):
            if wanted <= 0:
                break
            given = min(most.get(id(member), 0), wanted, member.target)
            member.target -= given
            wanted -= given
        return wanted

    def _want(self, now_s: float) -> None:
        for member in self._members.values():
            if member.new:
                member.asked = member.need = max(self.share - member.target, 0)
                member.new = member.asked > 0
            elif now_s - member.short_s >= WANT_S:
                member.asked = member.need = 0
            member.want = member.asked
            if not member.asked and now_s - member.tight_s < WANT_S:
                below, step = self.share - member.target, self.total // TIGHT_PART
                member.want = min(below, step) if below > 0 else step

    def _wanting(self) -> list[Member]:
        """Those that are short, below their share first, then who waits longest; those that are tight."""
        wanting = [member for member in self._members.values() if member.want]
        return sorted(wanting, key=lambda m: (not m.asked, m.target >= self.share, m.short_s))

    def _take(self, now_s: float) -> None:
        """Asks others for what is wanted, if all of it can be had."""
        spare = self._free() + sum(member.coming for member in self._members.values())
        for member in self._wanting():
            unused, idle = self._unused(member, now_s), self._idle(member, now_s)
            most = max(spare, 0) + sum(unused.values()) + sum(idle.values())
            if most < member.want:
                all_or_none = member.asked and not member.new
                member.want = most if not all_or_none else member.need if member.need <= most else 0
            missing = member.want - max(spare, 0)
            spare -= member.want
            if missing > 0:
                self._lower(self._lower(missing, unused), idle)
                spare = 0

    def _unused(self, taker: Member, now_s: float) -> dict[int, int]:
        """What each of the others was given and doesn't hold, but for some room to grow."""
        kept = self.share // FLOOR_PART
        return {
            id(each): max(each.target - max(each.held + self.share // STEP_PART, kept), 0)
            for each in self._members.values()
            if each is not taker and self._may_give(each) and now_s - each.given_s >= WANT_S
        }

    @staticmethod
    def _may_give(member: Member) -> bool:
        """It can be asked, and wants nothing itself."""
        return member.ready and not member.asked and not member.told

    def _idle(self, taker: Member, now_s: float) -> dict[int, int]:
        """What each of the others could give of what it holds, beyond what it doesn't hold."""
        unused, made = self._unused(taker, now_s), {}
        below_share = taker.target + taker.want <= self.share
        for each in self._members.values():
            if each is taker or each.told or not each.ready:
                continue
            kept = self.share // FLOOR_PART
            since_s = now_s - (each.short_s if taker.asked else each.used_s)
            if since_s < REST_S or each.asked:
                kept = self.share if below_share else each.target
            made[id(each)] = max(each.target - unused.get(id(each), 0) - max(each.busy, kept), 0)
        return made

    def _give(self, now_s: float) -> None:
        """Hands what is free to those who want it; what one waits for isn't given to those after it."""
        room = self.total - self.granted
        for member in self._wanting():
            if not member.ready or len(member.told) < TOLD_MAX:
                given = max(min(member.want, self._free() + member.coming, room), 0)
                member.target, member.want = member.target + given, member.want - given
                member.asked, member.need = max(member.asked - given, 0), max(member.need - given, 0)
                if given and not member.new:
                    member.given_s, member.tight_s = now_s, float("-inf")  # tight when more give way
                room -= given
            room -= member.want

    def _spread(self) -> None:
        """What nobody wants goes to all alike: then nobody has to ask for it."""
        spare = self.total - self.granted
        members = [member for member in self._open() if member.ready]
        if any(member.want for member in self._members.values()) or not members:
            return
        each = spare // len(members)
        for member in members:
            given = min(each, self._free() + member.coming)
            if given >= max(self.total // DUST_PART, 1):
                member.target += given
