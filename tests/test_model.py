"""The decoder: what it refuses, how it starts, what it computes, and the sizes it states."""

import math

import pytest
import torch

from config import build, read_preset
from model import KVCache, ModelConfig, Transformer, apply_rope, rope_table
from tests.conftest import ROOT

SMALL = dict(vocab_size=100, n_layer=2, n_head=4, n_embd=32, block_size=16)


def make(seed=0, **changes):
    config = ModelConfig(**(SMALL | changes))
    return Transformer(config).init_weights(torch.Generator().manual_seed(seed))


def randomised(model, seed=1):
    """Weights without zeros, as after some training: the starting ones hide what the zero projections hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def tokens_for(model, batch=2, length=16, seed=0):
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(n_head=4, n_kv_head=3), "choose one of 1, 2, 4"),
        (dict(n_head=4, n_kv_head=0), "choose one of 1, 2, 4"),
        (dict(n_embd=30), "use n_embd=28 or 32"),
        (dict(head_dim=7), "must be even"),
        (dict(n_layer=0), "n_layer=0 must be at least 1"),
        (dict(dropout=1.0), "must lie in"),
        (dict(sliding_window=0), "at least 1"),
        (dict(vocab_size=0), "at least 1"),
    ],
)
def test_impossible_shapes_are_refused_with_what_would_fit(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig(**(SMALL | changes))


def test_fields_left_out_are_derived():
    config = ModelConfig(vocab_size=50257, n_head=12, n_embd=768)
    assert (config.n_kv_head, config.head_dim, config.d_ff, config.padded_vocab_size) == (12, 64, 2048, 50304)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("extras", [{}, dict(qkv_bias=True), dict(qk_norm=True), dict(head_dim=10)])
def test_n_params_counts_the_parameters(n_kv_head, tie_embeddings, extras):
    model = make(n_kv_head=n_kv_head, tie_embeddings=tie_embeddings, **extras)
    assert model.config.n_params() == sum(p.numel() for p in model.parameters())


def test_n_params_by_hand():
    # One layer, width 8, 2 query heads and 1 KV head of 4, MLP of 16, vocabulary 64:
    # q 8*8, k and v 8*4 each, o 8*8, MLP 3*8*16, norms 3*8, embedding 64*8, head 64*8
    config = ModelConfig(
        vocab_size=64, n_layer=1, n_head=2, n_kv_head=1, n_embd=8, d_ff=16, block_size=4, tie_embeddings=False
    )
    assert config.n_params() == 64 + 32 + 32 + 64 + 384 + 24 + 512 + 512 == 1624


def test_flops_by_hand():
    config = ModelConfig(vocab_size=64, n_layer=1, n_head=2, n_kv_head=1, n_embd=8, d_ff=16, block_size=10)
    weights = 64 + 32 + 32 + 64 + 384 + 512  # the matrices above with the head, without the embedding look-up
    scores = 2 * 4 * 10  # multiply-adds of q k^T for one token: heads * head_dim * keys; and as many for p v
    forward = 2 * weights + 2 * 2 * scores
    assert config.flops_per_token(10) == 3 * forward == 6 * 1088 + 12 * 80
    assert config.flops_per_token(10, causal=True) == 6 * 1088 + 6 * 80
    wide = ModelConfig(vocab_size=64, n_layer=1, n_head=2, n_kv_head=1, n_embd=8, head_dim=6, d_ff=16, block_size=10)
    assert wide.flops_per_token(10) == 6 * (96 + 48 + 48 + 96 + 384 + 512) + 12 * 2 * 6 * 10


def test_flops_of_a_window_do_not_grow_past_it():
    config = ModelConfig(**(SMALL | dict(sliding_window=4)))
    assert config.flops_per_token(16) == config.flops_per_token(4)


def test_kv_cache_bytes_by_hand():
    # Llama 3 70B at 131,072 tokens: 2 * 80 layers * 8 heads * 128 * 2 bytes a token
    llama = ModelConfig(
        vocab_size=128256, n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, d_ff=28672, block_size=131072
    )
    assert llama.kv_cache_bytes(1, 131072) == 42_949_672_960
    cache = KVCache(ModelConfig(**(SMALL | dict(n_kv_head=2))), batch_size=3, length=5, dtype=torch.float32)
    expected = (cache.k.numel() + cache.v.numel()) * 4
    assert ModelConfig(**(SMALL | dict(n_kv_head=2))).kv_cache_bytes(3, 5, bytes_per_element=4) == expected


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("vocab_size, n_embd", [(66, 384), (257, 64), (4096, 192), (4096, 768)])
def test_first_loss_is_that_of_a_uniform_guess(tie_embeddings, vocab_size, n_embd):
    model = make(vocab_size=vocab_size, n_embd=n_embd, tie_embeddings=tie_embeddings, block_size=64, n_head=8)
    tokens = tokens_for(model, batch=16, length=65)
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    assert abs(loss - math.log(vocab_size)) < 0.05


@pytest.mark.parametrize("name", ["small", "shakespeare_char", "shakespeare_cpu", "gpt2_124m"])
def test_first_loss_of_the_presets(name):
    config = build(read_preset(ROOT / f"config/{name}.py")).with_vocab_size(66).model
    model = Transformer(config).init_weights(torch.Generator().manual_seed(0)).eval()
    tokens = tokens_for(model, batch=4, length=129)
    with torch.no_grad():
        assert abs(model(tokens[:, :-1], tokens[:, 1:]).item() - math.log(config.vocab_size)) < 0.05


def test_padded_columns_are_cut_off_and_carry_no_loss():
    model = randomised(make(vocab_size=100))
    assert model.embed.weight.shape[0] == 128
    tokens = tokens_for(model)
    logits = model(tokens)
    assert logits.shape == (2, 16, 100)
    with torch.no_grad():
        model.head.weight[100:] += 100.0
    assert torch.equal(model(tokens), logits)


def test_loss_is_the_mean_over_counted_targets():
    model = randomised(make())
    tokens, targets = tokens_for(model, seed=1), tokens_for(model, seed=2)
    targets[0, 3:] = -100
    log_probs = model(tokens).double().log_softmax(-1)
    counted = [log_probs[b, t, targets[b, t]] for b in range(2) for t in range(16) if targets[b, t] != -100]
    assert len(counted) == 19
    assert model(tokens, targets).item() == pytest.approx(-torch.stack(counted).mean().item(), rel=1e-5)


@pytest.mark.parametrize("changes", [{}, dict(n_kv_head=1), dict(qk_norm=True, qkv_bias=True), dict(sliding_window=3)])
def test_a_token_does_not_see_the_future(changes):
    model = randomised(make(**changes))
    tokens = tokens_for(model)
    logits = model(tokens)
    tokens[:, 10:] = (tokens[:, 10:] + 1) % 100
    changed = model(tokens)
    torch.testing.assert_close(changed[:, :10], logits[:, :10])
    assert (changed[:, 10:] - logits[:, 10:]).abs().amax(-1).min() > 1e-3


def test_a_window_ends_where_it_says():
    model = randomised(make(n_layer=1, sliding_window=4))
    tokens = tokens_for(model)
    logits = model(tokens)
    tokens[:, 5] = (tokens[:, 5] + 1) % 100
    moved = (model(tokens) - logits).abs().amax((0, 2)) > 1e-4
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("attention", ["torch", "naive"])
@pytest.mark.parametrize("changes", [{}, dict(sliding_window=3)])
def test_packed_documents_score_as_they_do_apart(attention, changes):
    config = ModelConfig(**(SMALL | dict(n_kv_head=2) | changes))
    model = randomised(Transformer(config, attention=attention).init_weights(torch.Generator().manual_seed(0)))
    lengths = [[5, 1, 10], [16]]
    tokens, targets = tokens_for(model, seed=1), tokens_for(model, seed=2)
    starts = [[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in lengths]
    packed = model(tokens, targets, doc_start=torch.tensor(starts, dtype=torch.int32))
    apart = torch.zeros(())
    for b, row in enumerate(lengths):
        for i, n in enumerate(row):
            part = slice(sum(row[:i]), sum(row[:i]) + n)
            apart = apart + n * model(tokens[b : b + 1, part], targets[b : b + 1, part])
    assert packed.item() == pytest.approx(apart.item() / 32, rel=1e-5)
    assert abs(packed.item() - model(tokens, targets).item()) > 1e-3
    packed.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_gqa_is_mha_with_shared_heads():
    grouped, full = randomised(make(n_kv_head=2)), make(n_kv_head=4)
    weights = grouped.state_dict()
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    tokens = tokens_for(full)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-4, atol=1e-4)


def test_rope_turns_half_split_pairs():
    config = ModelConfig(**(SMALL | dict(head_dim=4)))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    turned = apply_rope(x, rope_table(torch.tensor([3]), config)).flatten().tolist()
    a, b = 3.0, 3.0 / 100  # angles: position * theta ** (-2i / D), theta 10000
    expected = [math.cos(a) - 3 * math.sin(a), 2 * math.cos(b) - 4 * math.sin(b)]
    expected += [3 * math.cos(a) + math.sin(a), 4 * math.cos(b) + 2 * math.sin(b)]
    assert turned == pytest.approx(expected, rel=1e-5)


def test_rope_scores_depend_on_distance_alone():
    config = ModelConfig(**(SMALL | dict(head_dim=8)))
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind()

    def score(i, j):
        turn = lambda x, p: apply_rope(x, rope_table(torch.tensor([p]), config))  # noqa: E731
        return (turn(q, i) * turn(k, j)).sum().item()

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_dropout_is_of_training_only_and_follows_the_seed():
    model = randomised(make(dropout=0.5))
    tokens = tokens_for(model)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    model.train()

    def run(seed):
        torch.manual_seed(seed)
        return model(tokens)

    assert torch.equal(run(3), run(3))
    assert not torch.equal(run(3), run(4))


@pytest.mark.parametrize("attention", ["torch", "naive"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiles_without_graph_breaks(attention, dropout):
    config = ModelConfig(**(SMALL | dict(n_kv_head=2, dropout=dropout)))
    model = Transformer(config, attention=attention, dtype=torch.bfloat16).init_weights()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    tokens = tokens_for(model)
    compiled(tokens, tokens).backward()
    assert model.embed.weight.grad is not None


def test_naive_and_torch_attention_agree_with_gradients():
    results = {}
    for backend in ("torch", "naive"):
        config = ModelConfig(**(SMALL | dict(n_kv_head=2)))
        model = Transformer(config, attention=backend).init_weights(torch.Generator().manual_seed(0))
        randomised(model)
        tokens = tokens_for(model)
        model(tokens, tokens.roll(-1, 1)).backward()
        results[backend] = [p.grad for p in model.parameters()]
    for ours, theirs in zip(results["torch"], results["naive"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bf16_parameters_keep_fp32_angles():
    model = randomised(make(block_size=4096))
    tokens = tokens_for(model, batch=1, length=600)
    with torch.no_grad():
        exact = model(tokens)
        model.to(torch.bfloat16)
        rounded = model(tokens).float()
    # With bf16 angles, positions past 256 would be off by whole turns, and the logits by their own size.
    assert (rounded - exact).norm() / exact.norm() < 0.05


def test_a_model_needs_its_vocabulary():
    with pytest.raises(ValueError, match="vocab_size must be set"):
        Transformer(ModelConfig())
