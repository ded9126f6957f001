"""The packed decoder against the model it was packed from, the bits of its rows, and the kernels around a round."""

import random

import pytest
import torch
from test_engine import HEADS, tiny_model

from data import UserError
from decoding import CHUNK, LONG_CHUNK, Cache, Decoder, attend, cache_bytes, whole_chunks
from kernels import reference
from kernels import round as steps
from model import ModelConfig, Transformer

triton = pytest.importorskip("triton")
NO_TURNS = (0,) * 5
SHAPES = {
    **{name: dict(n_kv_head=heads) for name, heads in HEADS.items()},
    "qwen": dict(qkv_bias=True, qk_norm=True, head_dim=16, tie_embeddings=False),
    "window": dict(sliding_window=70, rope_scaling="linear:2"),
    "odd": dict(d_ff=173, n_kv_head=1, rope_scaling="yarn:2"),  # a width that the decoding kernel does not take
}


def ids_of(length, seed=1):
    return random.Random(seed).choices(range(256), k=length)


def fed(decoder, tokens, start, lengths=None):
    """Arguments of `Decoder.step` for int64 [B, T] tokens at positions start [B]."""
    start = torch.tensor(start, dtype=torch.int32)
    return decoder.embed[tokens.flatten()], start, start + tokens.shape[1] if lengths is None else lengths


def decoded(decoder, ids, prompt, width=1, kv="auto"):
    """Logits at the positions from prompt - 1 on [T, V]: all but the last token of a prompt prefilled, then steps."""
    cache = decoder.cache(1, whole_chunks(len(ids)), kv)
    decoder.prefill(ids[: prompt - 1], cache, 0)
    parts, at = [], prompt - 1
    while at < len(ids):
        tokens = torch.tensor([ids[at : at + width]])
        parts.append(decoder.step(*fed(decoder, tokens, [at]), cache))
        at += tokens.shape[1]
    return torch.cat(parts)[:, : decoder.config.vocab_size]


# ----- the same numbers as the model


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt", [1, CHUNK, CHUNK + 1, CHUNK + 2])
def test_logits_are_the_models(shape, prompt):
    """Prefill takes all of a prompt but its last token: 0, chunk - 1, chunk and chunk + 1 tokens."""
    model = tiny_model(block_size=600, **SHAPES[shape])
    ids = ids_of(prompt + 7)
    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0, prompt - 1 :]
    assert expected.std() > 0.5
    torch.testing.assert_close(decoded(Decoder.of(model), ids, prompt), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_chunked_prefill_is_one_shot(kv, monkeypatch):
    decoder = Decoder.of(tiny_model(block_size=600))
    ids = ids_of(300)
    caches = {}
    for chunk in (512, 256, 64, 7):
        monkeypatch.setattr("decoding.LONG_CHUNK", chunk)
        caches[chunk] = decoder.cache(1, 512, kv)
        decoder.prefill(ids, caches[chunk], 0)
    for chunk in (256, 64, 7):
        for name in ("k", "v"):
            one, many = (getattr(caches[c], name)[..., :300, :].float() for c in (512, chunk))
            torch.testing.assert_close(many, one, rtol=1e-4, atol=1.01 if kv == "int8" else 1e-4)
    resumed = decoder.cache(1, 512, kv)
    decoder.prefill(ids[:100], resumed, 0)
    decoder.prefill(ids, resumed, 0, start=100)
    torch.testing.assert_close(resumed.k.float(), caches[256].k.float(), rtol=1e-4, atol=1.01 if kv == "int8" else 1e-4)


def test_long_prompts_take_long_chunks(monkeypatch):
    read, ids = [], ids_of(2 * LONG_CHUNK + CHUNK + 5)
    monkeypatch.setattr(Decoder, "read", lambda self, chunk, place, start, *rest: read.append((start, len(chunk))))
    decoder = Decoder.of(tiny_model())
    decoder.prefill(ids, None, 0)
    assert read == [(0, 4096), (4096, 4096), (8192, CHUNK + 5)]


def test_prefill_writes_its_row_alone():
    decoder = Decoder.of(tiny_model())
    cache = decoder.cache(3, CHUNK)
    decoder.prefill(ids_of(20), cache, 1)
    assert not cache.k[:, 0].any() and not cache.k[:, 2].any()
    assert cache.k[:, 1, :, :20].any(-1).all() and not cache.k[:, 1, :, 20:].any()
    cache.copy_row(1, slice(2, 3), 20)
    assert torch.equal(cache.k[:, 1], cache.k[:, 2]) and torch.equal(cache.v[:, 1], cache.v[:, 2])


@pytest.mark.parametrize(
    ("options", "bound"), [(dict(quant="int8"), 0.03), (dict(kv="int8"), 0.03), (dict(quant="int4"), 0.4)], ids=str
)
def test_quantised_logits_are_near(options, bound):
    """Root mean square error relative to the logits' own deviation: bounds at about twice of what was measured."""
    model, ids = tiny_model(), ids_of(40)
    exact = decoded(Decoder.of(model), ids, 20)
    near = decoded(Decoder.of(model, options.get("quant")), ids, 20, kv=options.get("kv", "auto"))
    error = float((near - exact).square().mean().sqrt() / exact.std())
    assert 0 < error < bound, error


# ----- the same bits, alone and together


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("shape", ["gqa", "qwen", "window", "odd"])
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(shape, kv):
    """One token at a time, or 2, 5, 9 or 17 in a step; alone, or beside rows at other positions; over a chunk's end."""
    model = tiny_model(block_size=600, **{"head_dim": 16, **SHAPES[shape]})
    decoder = Decoder.of(model)
    ids, begin = ids_of(CHUNK + 24), CHUNK - 10
    alone = decoded(decoder, ids, begin + 1, 1, kv)
    for width in (2, 5, 9, 17):
        assert torch.equal(decoded(decoder, ids, begin + 1, width, kv)[: len(alone)], alone)
    cache = decoder.cache(3, 512, kv)
    others = [ids_of(30, seed=2), ids, ids_of(400, seed=3)]
    for row, text in enumerate(others):
        decoder.prefill(text[: [20, begin, 390][row]], cache, row)
    for step in range(0, 10, 2):
        at = [20 + step, begin + step, 390 + step]
        tokens = torch.tensor([text[a : a + 2] for text, a in zip(others, at, strict=True)])
        lengths = None
        if step > 4:  # the first row has ended
            at[0], lengths = steps.NOWHERE, torch.tensor([0, at[1] + 2, at[2] + 2], dtype=torch.int32)
        logits = decoder.step(*fed(decoder, tokens, at, lengths), cache)[:, :257].view(3, 2, -1)
        assert torch.equal(logits[1], alone[step : step + 2])
    assert not logits[0].any()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("quantised", [False, True])
def test_attention_of_a_cpu_is_the_definition(window, quantised):
    """At lengths 0, 1 and more, fewer than the tokens of a step too, with NaN in the slots behind."""
    torch.manual_seed(0)
    heads, tokens, head_dim, slots, lengths = 6, 3, 20, 300, [0, 1, 2, 3, 40, 300]
    q = torch.randn(len(lengths), heads, tokens, head_dim)
    k, v = torch.randn(2, len(lengths), 2, slots, head_dim)
    scales = {}
    if quantised:
        (k, k_scale), (v, v_scale) = reference.quantize_heads(k), reference.quantize_heads(v)
        scales = dict(k_scale=k_scale, v_scale=v_scale)
    for row, length in enumerate(lengths):
        for x in scales.values() if quantised else (k, v):
            x[row, :, length:] = torch.nan
    lengths = torch.tensor(lengths, dtype=torch.int32)
    expected = reference.flash_decode(q, k, v, lengths, window=window, **scales)
    torch.testing.assert_close(attend(q, k, v, lengths, window, scales), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 10, 14, 18])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2)])
def test_attention_of_a_cpu_does_not_depend_on_how_queries_lie(heads, head_dim):
    """Few channels: queries that do not begin where vector instructions like it, and strides that mean the same."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, heads[1], 128, head_dim)
    for length in range(4, 128, 5):
        q = torch.randn(1, heads[0], 4, head_dim)
        turned = q.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
        together = attend(q, k, v, torch.tensor([length]), None, {})
        assert torch.equal(attend(turned, k, v, torch.tensor([length]), None, {}), together)
        for t in range(4):
            alone = attend(q[:, :, t : t + 1].clone(), k, v, torch.tensor([length - 3 + t]), None, {})
            assert torch.equal(alone, together[:, :, t : t + 1])


def test_a_row_that_ended_writes_nothing():
    decoder = Decoder.of(tiny_model())
    cache = decoder.cache(2, CHUNK)
    x, start, lengths = fed(decoder, torch.tensor([[1, 2], [3, 4]]), [steps.NOWHERE, 5], torch.tensor([0, 7]).int())
    decoder.step(x, start, lengths, cache)
    assert not cache.k[:, 0].any() and cache.k[:, 1, :, 5:7].any() and not cache.k[:, 1, :, 7:].any()


# ----- memory


def test_packing_shares_what_it_can_and_releases_what_it_should():
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    decoder = Decoder.of(model)
    assert decoder.embed.data_ptr() == model.embed.weight.data_ptr() == decoder.head.values.data_ptr()
    assert decoder.layers[0].down.values.data_ptr() == model.layers[0].mlp.down_proj.weight.data_ptr()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    ids = ids_of(20)
    expected = decoded(decoder, ids, 3)
    released = Decoder.of(model, release=True)
    assert all(p.numel() == 0 for p in model.parameters())
    assert torch.equal(decoded(released, ids, 3), expected)
    assert decoder.weight_bytes() == 4 * model.config.n_params()


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_random_weights_are_made_tensor_by_tensor(quant, monkeypatch):
    config = ModelConfig(vocab_size=300, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, tie_embeddings=False)
    decoder = Decoder.random(config, "cpu", torch.bfloat16, quant, seed=3)
    again = Decoder.random(config, "cpu", torch.bfloat16, quant, seed=3)
    assert torch.equal(decoder.layers[2].down.values, again.layers[2].down.values)
    assert decoder.layers[0].qkv.bits == {None: 16, "int8": 8, "int4": 4}[quant]
    bits = 8 * decoder.weight_bytes() / config.matmul_params()
    assert bits == pytest.approx({None: 16, "int8": 8.5, "int4": 4.25}[quant], rel=0.03)
    logits = decoded(decoder, ids_of(10), 3)
    assert logits.isfinite().all() and 0.3 < logits.float().std() < 3


def test_impossible_packing_is_refused():
    with pytest.raises(ValueError, match="quant='int5' must be one of"):
        Decoder.of(tiny_model(), "int5")
    odd = Transformer(ModelConfig(vocab_size=64, n_layer=1, n_head=3, n_embd=48)).init_weights()
    with pytest.raises(UserError, match="--quant int4: .*rows of 48"):
        Decoder.of(odd.requires_grad_(False), "int4")


def test_cache_bytes_are_those_of_a_cache():
    config = tiny_model().config
    for kv in ("auto", "int8"):
        for dtype in (torch.float32, torch.bfloat16):
            made = Cache(config, 3, 512, "cpu", dtype, kv)
            assert made.nbytes == cache_bytes(config, 3, 512, dtype, kv)


def test_an_mha_cache_of_seventy_billion_is_refused():
    """Llama-3-70B at 131,072 tokens: 40 GiB with its 8 KV heads, 320 GiB with 64."""
    shape = dict(vocab_size=128256, n_layer=80, n_head=64, n_embd=8192, d_ff=28672, block_size=131072)
    gqa, mha = ModelConfig(n_kv_head=8, **shape), ModelConfig(n_kv_head=64, **shape)
    assert cache_bytes(gqa, 1, 131072, torch.bfloat16) == 42_949_672_960
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.memory_left", lambda device: 60 * 2**30)
        patch.setattr(torch, "zeros", None)  # any allocation would fail
        with pytest.raises(
            UserError, match=r"needs 320.0 GiB \(80 layers, 64 KV heads of 128\), and 60.0 GiB are left"
        ):
            Cache(mha, 1, 131072, "cpu", torch.bfloat16)


# ----- the steps of a round


def state(chance, batch=4, slots=300, drafts=16):
    """Rows at random places, one of which has ended; texts that repeat themselves."""
    text = [chance.choices(range(3), k=slots) for _ in range(batch)]
    position = [0, *(chance.randrange(0, slots - 20) for _ in range(batch - 1))]
    limit = [place + chance.choice([0, 1, 2, 5, 50]) for place in position]
    return dict(
        tokens=torch.tensor(text, dtype=torch.int32),
        position=torch.tensor(position, dtype=torch.int32),
        limit=torch.tensor(limit, dtype=torch.int32),
        drafts=torch.tensor([chance.choices(range(-1, 3), k=drafts) for _ in range(batch)], dtype=torch.int32),
        log=torch.zeros(batch, drafts + 3, dtype=torch.int32),
    )


def slow_match(tokens, position):
    """By definition: the longest of 4, 3 or 2 last tokens that occur before, where they occurred last."""
    for n in (4, 3, 2):
        last = tokens[position + 1 - n : position + 1]
        for end in range(position - 1, n - 2, -1):
            if len(last) == n and position + 1 >= n and tokens[end + 1 - n : end + 1] == last:
                return n << steps.INDEX_BITS | end + 1
    return 0


def test_look_up_is_its_definition():
    chance, found = random.Random(1), 0
    for _ in range(40):
        s = state(chance)
        steps.look_up(s["tokens"], s["position"], s["log"])
        expected = [
            slow_match(row, place) for row, place in zip(s["tokens"].tolist(), s["position"].tolist(), strict=True)
        ]
        assert s["log"][:, 1].tolist() == expected
        found += sum(score > 0 for score in expected)
    assert found > 60


def test_a_match_repeats_past_its_end():
    tokens = torch.tensor([[5, 1, 2, 3, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    position, log, drafts = torch.tensor([5]).int(), torch.zeros(1, 11).int(), torch.zeros(1, 8).int()
    steps.look_up(tokens, position, log)
    embed = torch.arange(10.0)[:, None]
    x, *_ = steps.gather(tokens, position, position + 9, drafts, torch.tensor([7]), embed, 8, match=log[:, 1])
    assert drafts[0, :7].tolist() == [3, 1, 2, 3, 1, 2, 3] and x[:, 0].tolist() == [2, 3, 1, 2, 3, 1, 2, 3]


def test_accept_by_hand():
    s = dict(
        tokens=torch.zeros(4, 20, dtype=torch.int32),
        position=torch.tensor([3, 3, 3, 3]).int(),
        limit=torch.tensor([9, 9, 5, 3]).int(),
        drafts=torch.tensor([[7, 8, 9], [7, -1, 9], [7, 8, 9], [7, 8, 9]]).int(),
        log=torch.full((4, 6), 99).int(),
    )
    chosen = torch.tensor([[7, 8, 9, 6]] * 4)
    steps.accept(s["tokens"], s["position"], s["limit"], s["drafts"], chosen, s["log"], NO_TURNS)
    assert s["log"][:, 0].tolist() == [4, 2, 2, 0]  # all stood; one did; the limit cuts; the row had ended
    assert s["log"][:, 1].tolist() == [0] * 4 and s["log"][0, 2:].tolist() == [7, 8, 9, 6]
    assert s["position"].tolist() == [7, 5, 5, 3]
    assert s["tokens"][0, 4:8].tolist() == [7, 8, 9, 6] and not s["tokens"][3].any()


@pytest.mark.parametrize(
    "turns,added", [((3, 9), 4), ((4, 9), 1), ((2, 6), 3), ((5, 6), 2), ((7, 8), 4), ((1, 2, 3, 5, 9), 2)]
)
def test_no_token_is_accepted_from_behind_a_turning_point(turns, added):
    """The round begins at 3, and its choices are made at 3, 4, 5 and 6."""
    one = dict(tokens=torch.zeros(1, 20).int(), position=torch.tensor([3]).int(), limit=torch.tensor([15]).int())
    log, chosen = torch.zeros(1, 6).int(), torch.tensor([[7, 8, 9, 6]])
    steps.accept(*one.values(), torch.tensor([[7, 8, 9]]).int(), chosen, log, turns)
    assert log[0, 0] == added and one["position"].item() == 3 + added


@pytest.mark.parametrize("seed", range(6))
def test_kernels_are_their_plain_functions(seed):
    """In the interpreter."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("tests/gpu has this one on a GPU")
    compare_kernels(random.Random(seed), "cpu")


def ring_for(log, logprobs, pin_memory=False):
    shapes = ((log.shape, torch.int32), (logprobs.shape, torch.float32), ((4,), torch.int64))
    return tuple(torch.zeros(3, *shape, dtype=dtype, pin_memory=pin_memory) for shape, dtype in shapes)


def test_rounds_are_published_in_turn():
    log, logprobs, stamps = torch.zeros(2, 19).int(), torch.zeros(2, 17), torch.tensor([[5, 0], [6, 0], [7, 0]])
    ring, turn = ring_for(log, logprobs), torch.zeros(1).int()
    for i in range(5):
        steps.publish(log + i, logprobs + i if i < 4 else None, stamps + i, turn, ring)
    logs, chances, times = ring
    assert turn.item() == 2 and [logs[place].unique().item() for place in range(3)] == [3, 4, 2]
    assert [chances[place].unique().item() for place in range(3)] == [3, 1, 2]  # the last had none
    assert times[:, :3].tolist() == [[8, 9, 10], [9, 10, 11], [7, 8, 9]]
    assert 0 < times[2, 3] < times[0, 3] < times[1, 3]


def compare_kernels(chance, device):
    """Gather, accept, look_up and, on a GPU, publish by kernels and by plain functions, from the same state."""
    plain = state(chance)
    width = chance.choice([1, 2, 3, 9, 17])
    embed, seeds = torch.randn(5, 48), torch.tensor([chance.getrandbits(62) for _ in range(4)])
    steps.look_up(plain["tokens"], plain["position"], plain["log"])
    kernel = {name: x.to(device, copy=True) for name, x in plain.items()}
    kernel["log"][:, 1] = 0
    steps.launch_look_up(kernel["tokens"], kernel["position"], kernel["log"])
    for first, shift, match in [
        (0, None, False),
        (0, None, True),
        (-1, None, False),
        (2, None, False),
        (0, -16, False),
    ]:
        size = width if first == 0 else min(width, 2)
        options = dict(first=first, shift=None if shift is None else torch.tensor([shift]).int())
        outs = []
        for s in (plain, kernel):
            to = s["tokens"].device
            launch = steps.gather if s is plain else steps.launch_gather
            arguments = [s["tokens"], s["position"], s["limit"], s["drafts"], seeds.to(to), embed.to(to), size]
            moved = {k: v.to(to) if torch.is_tensor(v) else v for k, v in options.items()}
            outs.append(launch(*arguments, **moved, match=s["log"][:, 1] if match else None))
        for a, b in zip(*outs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b.cpu())
    chosen, turns = torch.randint(0, 3, (4, width)), tuple(sorted(chance.sample(range(20), 5)))
    for s, launch in ((plain, steps.accept), (kernel, steps.launch_accept)):
        launch(s["tokens"], s["position"], s["limit"], s["drafts"], chosen.to(s["tokens"].device), s["log"], turns)
    if device == "cuda":  # the interpreter has no clock
        logprobs, stamps, rings = torch.rand(4, 17), torch.randint(9, (3, 2)), []
        for s in (plain, kernel):
            to = s["tokens"].device
            ring, turn = ring_for(s["log"], logprobs, pin_memory=to.type == "cuda"), torch.ones(1).int().to(to)
            for _ in range(2):
                steps.publish(s["log"], logprobs.to(to), stamps.to(to), turn, ring)
            assert turn.item() == 0 and (ring[2][1:, 3] > 0).all()
            ring[2][:, 3] = 0
            rings.append(ring)
        assert all(torch.equal(a, b) for a, b in zip(*rings, strict=True))
    for name in plain:
        assert torch.equal(plain[name], kernel[name].cpu()), name
