"""LLaMA models give what transformers gives from the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.peers

torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")

import zoo.llama  # noqa: E402 - after the peers, which this file can't do without
from zoo.llama import perplexity  # noqa: E402

ALICE = Path(__file__).resolve().parents[1] / "zoo" / "llama" / "data" / "alice.txt"

# SmolLM2's chat prompt for "What is the capital of France?", and its greedy reply.
PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531,
    198,
]  # fmt: skip
REPLY = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def make_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer with `size` tokens: 256 bytes, made-up merges of two."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in letters][: size - len(vocabulary) - 2]
    for a, b in pairs:
        vocabulary[a + b] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def tiny_model(
    folder: Path, kv_heads: int, tied: bool, seed: int = 0
) -> transformers.LlamaForCausalLM:
    """A random checkpoint as safetensors. Weights are large enough that logits differ clearly."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
        bos_token_id=318,
        eos_token_id=319,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # otherwise all ones, and a norm applied twice or not would not show
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, safe_serialization=True)
    make_tokenizer(folder, config.vocab_size)
    return model


def their_logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def greedy(model: zoo.llama.Llama, ids: list[int], count: int) -> list[int]:
    out: list[int] = []
    while len(out) < count:
        out.append(int(model.context.next_logits([*ids, *out]).argmax()))
    return out


def their_greedy(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    out: list[int] = []
    while len(out) < count:
        out.append(int(their_logits(model, [*ids, *out])[-1].argmax()))
    return out


@pytest.mark.parametrize(("kv_heads", "tied"), [(2, False), (3, True), (6, False), (1, False)])
def test_tiny_checkpoint_gives_the_same_logits(tmp_path: Path, kv_heads: int, tied: bool) -> None:
    """Both in float32 over sums of at most 80 terms: 1e-4 of logits near 10 is some 100 roundings.

    A wrong order of the rows of q and k, or wrong grouping of heads, is off by whole units.
    """
    theirs = tiny_model(tmp_path, kv_heads, tied)
    ids = np.random.default_rng(kv_heads).integers(0, 318, 50).tolist()
    ours = zoo.llama.load(tmp_path, dtype="f32")
    want = their_logits(theirs, ids)
    assert np.abs(want).max() > 1, "logits too close to 0 to compare"
    got = ours.logits(ids)
    assert got.shape == want.shape and got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["opencl", "reference"])
def test_tiny_checkpoint_gives_the_same_greedy_tokens(tmp_path: Path, device: str) -> None:
    theirs = tiny_model(tmp_path, kv_heads=2, tied=False, seed=1)
    ours = zoo.llama.load(tmp_path, device=device, dtype="f32")
    ids = np.random.default_rng(1).integers(0, 318, 9).tolist()
    assert greedy(ours, ids, 24) == their_greedy(theirs, ids, 24)


def test_bfloat16_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    """The same bfloat16 weights in float32 arithmetic on both sides: tolerance as above."""
    tiny_model(tmp_path, kv_heads=2, tied=False, seed=2).to(torch.bfloat16).save_pretrained(
        tmp_path
    )
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = list(range(40))
    want = their_logits(theirs, ids)
    ours = zoo.llama.load(tmp_path, dtype="f32")
    np.testing.assert_allclose(ours.logits(ids), want, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def their_smollm2(smollm2: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()


def test_smollm2_logits_equal_those_of_the_dequantised_file(
    smollm2: Path, their_smollm2: torch.nn.Module
) -> None:
    """In float32 both: 30 layers of sums in another order leave 1e-3 of logits up to 25."""
    ours = zoo.llama.load(smollm2, dtype="f32")
    ids = [*PROMPT, *REPLY]
    want = their_logits(their_smollm2, ids)
    np.testing.assert_allclose(ours.logits(ids), want, atol=2e-3)


def test_smollm2_greedy_reply_equals_theirs(smollm2: Path, their_smollm2: torch.nn.Module) -> None:
    ours = zoo.llama.load(smollm2)
    assert their_greedy(their_smollm2, PROMPT, 8) == REPLY
    assert greedy(ours, PROMPT, 8) == REPLY


def test_a_long_prompt_in_pieces_equals_theirs(
    smollm2: Path, their_smollm2: torch.nn.Module
) -> None:
    """Longer than one prefill block, then decoded token by token past it."""
    ours = zoo.llama.load(smollm2, dtype="f32", ctx=512)
    ids = np.random.default_rng(3).integers(300, 40000, 300).tolist()
    want = their_logits(their_smollm2, ids)
    for length in (200, 201, 300):
        got = ours.context.next_logits(ids[:length])
        np.testing.assert_allclose(got, want[length - 1], atol=5e-3)


def their_losses(model: torch.nn.Module, ids: list[int], first: int) -> list[float]:
    """-log p of the tokens from `first` on."""
    logits = torch.from_numpy(their_logits(model, ids)[first - 1 : -1])
    targets = torch.tensor(ids[first:])
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()


@pytest.mark.parametrize(("ctx", "stride", "cut"), [(512, None, None), (300, 200, 2500)])
def test_perplexity_equals_theirs(
    smollm2: Path,
    their_smollm2: torch.nn.Module,
    ctx: int,
    stride: int | None,
    cut: int | None,
) -> None:
    ours = zoo.llama.load(smollm2, ctx=ctx)
    ids = ours.tokenizer.encode(ALICE.read_text("utf-8"))[:cut]
    assert len(ids) > 20_000 or cut
    found = perplexity.measure(ours, ids, ctx, stride)
    losses = [
        loss
        for begin, end, first in perplexity.windows(len(ids), ctx, stride)
        for loss in their_losses(their_smollm2, ids[begin:end], first - begin)
    ]
    assert len(losses) == found.scored
    # The products in int8 terms of "auto" moved it by 0.007 %.
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
