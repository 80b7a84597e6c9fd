"""Automatic sharing: what is resident isn't computed again, is never taken for more, nor given to others."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from tests.engine.harness import Bench, greedy
from tests.tiny import make_tiny_model

from stateroom.caches.stored_rows import CHAIN_MAX
from stateroom.client import protocol as p
from stateroom.daemon.engine.model import LoadedModel
from stateroom.daemon.engine.sharing import SHARE_MIN
from stateroom.daemon.scheduler.pace import Pace

LONG = 600


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return make_tiny_model(context=2048)


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return [(13 * k + 7 * seed) % 200 for k in range(n)]


def opened(bench: Bench, tokens: list[int], owner: str = "", **options: object) -> tuple[str, p.Receipt]:
    body = bench.finish(bench.start(p.Open(tokens=tokens, **options), owner=owner))  # type: ignore[arg-type]
    assert isinstance(body, p.OpenResult), body
    assert body.receipt is not None
    return body.session, body.receipt


def synced(bench: Bench, session: str, tokens: list[int]) -> p.Receipt:
    body = bench.call(p.Sync(session=session, tokens=tokens))
    assert isinstance(body, p.LengthResult), body
    return body.receipt


def said(receipt: p.Receipt) -> tuple[int, str, int]:
    return receipt.reused, receipt.source, receipt.prefilled


def test_an_open_takes_what_another_session_holds(loaded: LoadedModel) -> None:
    """Nothing is copied, only the rest is computed, and both go their own ways."""
    bench = Bench(loaded)
    first, alone = opened(bench, tokens_of(LONG))
    assert said(alone) == (0, "none", LONG)
    computed, held, at = bench.engine.filling.tokens, bench.engine.kv_bytes, mx.get_active_memory()
    second, receipt = opened(bench, tokens_of(LONG))
    assert said(receipt) == (LONG - 1, "shared", 1)
    assert bench.engine.filling.tokens == computed
    assert bench.engine.kv_bytes == held
    assert mx.get_active_memory() == at
    third, receipt = opened(bench, [*tokens_of(LONG)[:400], *tokens_of(50, 3)])
    assert said(receipt) == (400, "shared", 50)
    assert bench.engine.filling.tokens == computed + 49
    for session in (first, second, third):
        assert bench.decode(session, 5, ignore_eos=True).tokens
        bench.check_law(session)


@pytest.mark.parametrize(("common", "shares"), [(SHARE_MIN - 1, False), (SHARE_MIN, True)])
def test_a_few_tokens_are_not_worth_it(loaded: LoadedModel, common: int, shares: bool) -> None:
    bench = Bench(loaded)
    opened(bench, tokens_of(LONG))
    tokens = [*tokens_of(common), 201, 202, 203]
    session, receipt = opened(bench, tokens)
    assert said(receipt) == ((common, "shared", 3) if shares else (0, "none", len(tokens)))
    bench.check_law(session)


def test_a_sync_leaves_its_own_for_what_another_has_more_of(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    opened(bench, tokens_of(LONG))
    session, _ = opened(bench, tokens_of(20, 9))
    assert said(synced(bench, session, tokens_of(LONG))) == (LONG - 1, "shared", 1)
    bench.check_law(session)
    kept = [*tokens_of(LONG)[:300], 1, 2, 3]
    assert said(synced(bench, session, kept)) == (300, "session", 3), "its own is as good"
    bench.check_law(session)
    more = [*kept, *tokens_of(100, 2)]
    opened(bench, more)
    assert said(synced(bench, session, more)) == (402, "shared", 1)
    bench.check_law(session)


def test_an_empty_session_takes_it_with_a_prefill(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    opened(bench, tokens_of(LONG))
    session = bench.open()
    body = bench.call(p.Prefill(session=session, tokens=tokens_of(LONG - 100), progress=True))
    assert isinstance(body, p.LengthResult)
    assert said(body.receipt) == (LONG - 101, "shared", 1)
    bench.check_law(session)


def test_what_a_dead_worker_lost_is_computed_once_for_all() -> None:
    """Sessions that were handed over as tokens: each is exact, their common beginning costs once."""
    loaded = make_tiny_model(context=2048)
    bench = Bench(loaded)
    sessions = [f"old{n}" for n in range(3)]
    for n, session in enumerate(sessions):
        bench.adopt(session, [*tokens_of(LONG), n, n + 1, n + 2])
    rids = [bench.start(p.Decode(session=s, max_tokens=4, ignore_eos=True)) for s in sessions]
    bench.finish(*rids)
    assert LONG + 2 <= bench.engine.filling.tokens <= LONG + 2 + 2 * 3
    for rid, session in zip(rids, sessions, strict=True):
        body = bench.final(rid)
        assert isinstance(body, p.DecodeResult)
        assert body.tokens == greedy(bench, bench.session(session).tokens[: LONG + 3], 4)
        bench.check_law(session)
    assert sorted(bench.final(rid).usage.prefilled for rid in rids)[:2] == [3, 3]  # type: ignore[union-attr]


def test_other_owners_and_schemes_share_nothing() -> None:
    """B74: the same tokens of another owner, or to be stored otherwise, are not these."""
    bench = Bench(make_tiny_model(width=256, context=2048))
    opened(bench, tokens_of(LONG), owner="a")
    _, receipt = opened(bench, tokens_of(LONG), owner="b")
    assert said(receipt) == (0, "none", LONG)
    for kv in (p.KV(scheme="affine8"), p.KV(scheme="affine8", quantise_after=300)):
        session, receipt = opened(bench, tokens_of(LONG), owner="a", kv=kv)
        assert said(receipt) == (0, "none", LONG)
        again, receipt = opened(bench, tokens_of(LONG), owner="a", kv=kv)
        assert said(receipt) == (LONG - 1, "shared", 1)
        for each in (session, again):
            bench.check_law(each)


def test_ids_that_differ_in_high_bits_share_nothing() -> None:
    """B74: a key of fewer bits than an id has would take one prompt for another."""
    bench = Bench(make_tiny_model(context=2048, vocab=600))
    opened(bench, [7] * LONG)
    other = [7 + 256] * LONG
    session, receipt = opened(bench, other)
    assert said(receipt) == (0, "none", LONG)
    bench.check_law(session)


def test_a_prefix_that_was_quantised_serves_where_it_would_have_been() -> None:
    """Below `quantise_after` a session has dense tokens, and takes none that were stored otherwise."""
    bench = Bench(make_tiny_model(width=256, context=2048))
    kv = p.KV(scheme="affine8", quantise_after=300)
    opened(bench, tokens_of(LONG), kv=kv)
    short, receipt = opened(bench, tokens_of(250), kv=kv)
    assert said(receipt) == (0, "none", 250)
    longer, receipt = opened(bench, [*tokens_of(400), *tokens_of(30, 1)], kv=kv)
    assert said(receipt) == (400, "shared", 30)
    still_dense, receipt = opened(bench, [*tokens_of(240), 1, 2], kv=kv)
    assert said(receipt) == (240, "shared", 2)
    for session in (short, longer, still_dense):
        bench.check_law(session)
        bench.decode(session, 70, ignore_eos=True)
        bench.check_law(session)


@pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2", "falcon_h1", "mamba"])
def test_layers_that_cannot_be_trimmed_share_from_checkpoints(architecture: str) -> None:
    bench = Bench(make_tiny_model(architecture, context=2048))
    first, _ = opened(bench, tokens_of(LONG))
    assert 256 in bench.session(first).trail.lengths
    second, receipt = opened(bench, [*tokens_of(400), *tokens_of(30, 1)])
    assert said(receipt) == (256, "shared", 174)
    whole, receipt = opened(bench, tokens_of(LONG))
    assert said(receipt) == (LONG - 1, "shared", 1)
    for session in (first, second, whole):
        bench.check_law(session)
        bench.decode(session, 3, ignore_eos=True)
        bench.check_law(session)
    # It can go back to what it took along.
    body = bench.call(p.Trim(session=second, to=257))
    assert isinstance(body, p.LengthResult)
    bench.check_law(second)


def test_a_model_whose_forks_copy_shares_by_a_copy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateroom.daemon.engine.kv.branches_agree", lambda model: False)
    bench = Bench(loaded)
    first, _ = opened(bench, tokens_of(LONG))
    computed = bench.engine.filling.tokens
    second, receipt = opened(bench, tokens_of(LONG))
    assert said(receipt) == (LONG - 1, "shared", 1)
    assert bench.engine.filling.tokens == computed
    assert bench.engine.kv_bytes == sum(bench.session(each).kv_bytes for each in (first, second))
    for session in (first, second):
        bench.check_law(session)


# ---------------------------------------------------------------- lenders that are busy


@pytest.mark.parametrize("company", [0, 2])
def test_a_running_stream_lends_and_draws_what_it_would_have(loaded: LoadedModel, company: int) -> None:
    bench = Bench(loaded)
    lender, _ = opened(bench, tokens_of(LONG))
    others = [opened(bench, tokens_of(20 + n, n + 1))[0] for n in range(company)]
    rids = [bench.start(p.Decode(session=s, max_tokens=60, ignore_eos=True)) for s in [lender, *others]]
    while len(bench.bodies[rids[0]]) < 5:
        bench.engine.step()
    computed = bench.engine.filling.tokens
    session, receipt = opened(bench, tokens_of(LONG))
    assert said(receipt) == (LONG - 1, "shared", 1)
    assert bench.engine.filling.tokens == computed
    assert bench.final(rids[0]) is None
    bench.finish(*rids)
    assert bench.final(rids[0]).tokens == greedy(bench, tokens_of(LONG), 60)  # type: ignore[union-attr]
    for each in (lender, session, *others):
        bench.check_law(each)


def quanta(bench: Bench, rid: int, stored: int) -> None:
    """Runs until a fill's session has so many tokens."""
    session = bench.engine.requests[rid].session
    while session.stored < stored:
        bench.engine.step()


def test_two_opens_of_one_prompt_compute_it_once(loaded: LoadedModel) -> None:
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    prompts = [[*tokens_of(LONG), *tokens_of(40 + n, n)] for n in range(4)]
    rids = [bench.start(p.Open(tokens=tokens)) for tokens in prompts]
    other = bench.start(p.Open(tokens=tokens_of(100, 5)))
    bench.finish(*rids, other)
    bodies = [bench.final(rid) for rid in rids]
    assert bench.engine.filling.tokens == LONG + sum(39 + n for n in range(4)) + 99
    receipts = [body.receipt for body in bodies]  # type: ignore[union-attr]
    assert [said(receipt) for receipt in receipts] == [
        (0, "none", LONG + 40),
        *((LONG, "shared", 40 + n) for n in range(1, 4)),
    ]
    for body in bodies:
        bench.check_law(body.session)  # type: ignore[union-attr]


def test_what_a_cancelled_open_has_finished_serves_the_one_that_waits(loaded: LoadedModel) -> None:
    """B22: only what is stored and complete; and the wait is over with the one that was waited for."""
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    first, second = bench.start(p.Open(tokens=tokens_of(LONG))), bench.start(p.Open(tokens=tokens_of(LONG)))
    quanta(bench, first, 100)
    bench.cancel(first)
    bench.finish(first, second)
    one, two = bench.final(first), bench.final(second)
    assert isinstance(one, p.OpenResult)
    assert isinstance(two, p.OpenResult)
    assert one.finish == "cancelled"
    assert two.receipt is not None
    assert said(two.receipt) == (one.length - 1, "shared", LONG - one.length + 1)
    for body in (one, two):
        bench.check_law(body.session)


def test_a_wait_is_cancelled_at_once_and_leaves_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    first, second = bench.start(p.Open(tokens=tokens_of(LONG))), bench.start(p.Open(tokens=tokens_of(LONG)))
    third = bench.start(p.Open(tokens=tokens_of(LONG)))
    quanta(bench, first, 32)
    bench.cancel(second)
    for _ in range(2):
        bench.engine.step()
    body = bench.final(second)
    assert isinstance(body, p.OpenResult)
    assert (body.finish, body.length) == ("cancelled", 0)
    assert bench.final(first) is None
    bench.finish(first, third)
    assert said(bench.final(third).receipt) == (LONG - 1, "shared", 1)  # type: ignore[union-attr]


def test_a_wait_ends_when_the_one_ahead_fails(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from stateroom.daemon.engine.fill import Fill

    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    first, second = bench.start(p.Open(tokens=tokens_of(LONG))), bench.start(p.Open(tokens=tokens_of(LONG)))
    quanta(bench, first, 32)
    plain = Fill.landed

    def failing(fill: Fill, tokens: int, arrays: list[mx.array]) -> None:
        if fill.rid == first:
            raise RuntimeError("the device is on fire")
        plain(fill, tokens, arrays)

    monkeypatch.setattr(Fill, "landed", failing)
    bench.finish(first, second)
    assert isinstance(bench.final(first), p.ErrorBody)
    body = bench.final(second)
    assert isinstance(body, p.OpenResult)
    assert body.receipt is not None
    assert said(body.receipt) == (0, "none", LONG)
    bench.check_law(body.session)


def test_nobody_waits_for_what_gives_way_to_it(loaded: LoadedModel) -> None:
    """Then the wait would be as long as whatever else is interactive takes."""
    bench = Bench(loaded, pace=Pace(idle_ms=0.0))
    slow = bench.start(p.Open(tokens=tokens_of(LONG), session_class="background"))
    quanta(bench, slow, 16)
    body = bench.finish(bench.start(p.Open(tokens=tokens_of(LONG))))
    assert isinstance(body, p.OpenResult)
    assert bench.final(slow) is None
    bench.finish(slow)
    for session in (body.session, bench.final(slow).session):  # type: ignore[union-attr]
        bench.check_law(session)


# ---------------------------------------------------------------- budget


@pytest.mark.usefixtures("refusing")
def test_admission_knows_what_is_shared(loaded: LoadedModel) -> None:
    probe = Bench(loaded)
    opened(probe, tokens_of(LONG))
    one = probe.engine.kv_bytes
    step = probe.engine.schemes.dense.projected_bytes(256, 1)
    bench = Bench(loaded, kv_budget_bytes=one + 7 * step // 2)
    opened(bench, tokens_of(LONG))
    for n in range(3):
        session, receipt = opened(bench, [*tokens_of(LONG), n, n, n])
        assert receipt.source == "shared"
        bench.check_law(session)
        assert bench.engine.kv_bytes <= bench.engine.memory.budget_bytes  # type: ignore[operator]
    refused = bench.call(p.Open(tokens=tokens_of(LONG, 5)))
    assert isinstance(refused, p.ErrorBody)
    assert refused.code == "capacity"
    refused = bench.finish(bench.start(p.Open(tokens=tokens_of(LONG)), owner="somebody else"))
    assert isinstance(refused, p.ErrorBody)


def test_two_at_once_need_the_room_of_one(loaded: LoadedModel) -> None:
    """The second is admitted on what the first will have."""
    probe = Bench(loaded)
    opened(probe, tokens_of(1000))
    one = probe.engine.kv_bytes
    step = probe.engine.schemes.dense.projected_bytes(256, 1)
    bench = Bench(loaded, kv_budget_bytes=one + 3 * step, pace=Pace(idle_ms=0.0))
    rids = [bench.start(p.Open(tokens=tokens_of(1000))) for _ in range(2)]
    bench.finish(*rids)
    assert [type(bench.final(rid)) for rid in rids] == [p.OpenResult] * 2
    assert bench.engine.kv_bytes <= bench.engine.memory.budget_bytes  # type: ignore[operator]


# ---------------------------------------------------------------- the law, whatever happens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_whatever_is_shared_the_law_holds(architecture: str, seed: int) -> None:
    """Opens, syncs, forks, trims, decodes and closes over a few beginnings, several at a time."""
    bench = Bench(make_tiny_model(architecture, context=2048), pace=Pace(idle_ms=0.0))
    draw = random.Random(seed)
    begun: list[tuple[int, str | None]] = []

    def tokens() -> list[int]:
        cut = draw.choice([0, 40, 100, 270])
        return [*tokens_of(300)[:cut], *tokens_of(draw.choice([1, 5, 60, 130]), draw.randrange(3))]

    for _ in range(40):
        sessions = list(bench.engine.sessions)
        free = [s for s in sessions if all(r.session.id != s for r in bench.engine.requests.values())]
        session = draw.choice(free) if free else None
        chance = draw.random()
        if session is None or chance < 0.3:
            begun.append((bench.start(p.Open(tokens=tokens())), None))
        elif chance < 0.5:
            begun.append((bench.start(p.Sync(session=session, tokens=tokens())), session))
        elif chance < 0.6:
            begun.append((bench.start(p.Fork(session=session, n=2)), session))
        elif chance < 0.7 and bench.session(session).length:
            to = draw.randrange(bench.session(session).length)
            begun.append((bench.start(p.Trim(session=session, to=to, replay=True)), session))
        elif chance < 0.9 and bench.session(session).tokens:
            begun.append((bench.start(p.Decode(session=session, max_tokens=9, ignore_eos=True)), session))
        else:
            begun.append((bench.start(p.Close(session=session)), session))
        for _ in range(draw.choice([0, 1, 6, 40])):
            bench.engine.step()
        if draw.random() < 0.1:
            bench.cancel(draw.choice(begun)[0])
    bench.idle()
    assert bench.incidents == []
    assert all(bench.final(rid) is not None for rid, _ in begun)
    for session in bench.engine.sessions:
        bench.check_law(session)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2"])
def test_what_is_copied_of_a_lender_is_held_to_the_budget(architecture: str) -> None:
    """A short run of tokens, windows and states: whatever room there is, no more is taken."""
    model = make_tiny_model(architecture, context=2048)
    for extra in range(4_000, 72_000, 12_000):
        bench = Bench(model)
        opened(bench, tokens_of(40))
        bench.engine.memory.budget_bytes = bench.engine.kv_bytes + extra
        rid = bench.start(p.Open(tokens=[*tokens_of(39), *[1] * 5]))
        bench.finish(rid)
        assert bench.engine.kv_bytes <= bench.engine.memory.budget_bytes


@pytest.mark.usefixtures("refusing")
def test_too_many_trunks_are_brought_together_only_where_there_is_room(loaded: LoadedModel) -> None:
    """Else the beginning is computed again, or refused, and the lender is as it was."""
    bench = Bench(loaded)
    lender, _ = opened(bench, tokens_of(300))
    for n in range(CHAIN_MAX):
        bench.call(p.Fork(session=lender, n=1))
        bench.call(p.Prefill(session=lender, tokens=tokens_of(100, n)))
    held = bench.engine.kv_bytes
    for room, source in ((held // 10, None), (2 * held, "shared")):
        bench.engine.memory.budget_bytes = held + room
        body = bench.finish(bench.start(p.Open(tokens=[*bench.session(lender).tokens, 1])))
        if source is None:
            assert isinstance(body, p.ErrorBody)
            assert bench.engine.kv_bytes == held
        else:
            assert isinstance(body, p.OpenResult)
            assert body.receipt is not None
            assert body.receipt.source == source
        assert bench.engine.kv_bytes <= held + room
    bench.check_law(lender)


def test_a_trunk_that_computes_its_own_takes_nothing_from_a_fork() -> None:
    """A fork of a trunk of the background overtakes it: what is under way in the trunk isn't replaced."""
    bench = Bench(make_tiny_model(context=1024), pace=Pace(idle_ms=1.0))
    tokens = [(13 * k) % 200 for k in range(600)]
    bench.adopt("trunk", tokens, trunk="trunk", trunk_length=len(tokens), background=True)
    forked = bench.call(p.Fork(session="trunk", n=1))
    assert isinstance(forked, p.ForkResult)
    (child,) = forked.sessions
    verify = bench.start(p.Verify(session="trunk"))
    while not bench.session("trunk").stored:
        bench.turn()
    bench.call(p.Prefill(session=child, tokens=[1]))
    assert bench.session("trunk").stored + SHARE_MIN < len(tokens)
    assert isinstance(bench.finish(verify), p.VerifyResult)
    assert bench.incidents == []
    bench.check_law("trunk")
    bench.check_law(child)
