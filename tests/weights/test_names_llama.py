"""Name tables: every layout gives Meta's names, and query/key rows in Meta's order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.weights import models
from weights import Params, WeightError, check, load, names
from weights.checkpoint import Checkpoint, TensorInfo
from weights.entries import from_raw

HEADS, KV_HEADS, HEAD, DIM, HIDDEN, LAYERS = 4, 2, 6, 24, 10, 2  # fewer KV heads than heads

CANONICAL = {
    "tok_embeddings.weight": (7, DIM),
    "norm.weight": (DIM,),
    "output.weight": (7, DIM),
}
for _n in range(LAYERS):
    CANONICAL |= {
        f"layers.{_n}.attention.wq.weight": (HEADS * HEAD, DIM),
        f"layers.{_n}.attention.wk.weight": (KV_HEADS * HEAD, DIM),
        f"layers.{_n}.attention.wv.weight": (KV_HEADS * HEAD, DIM),
        f"layers.{_n}.attention.wo.weight": (DIM, HEADS * HEAD),
        f"layers.{_n}.feed_forward.w1.weight": (HIDDEN, DIM),
        f"layers.{_n}.feed_forward.w2.weight": (DIM, HIDDEN),
        f"layers.{_n}.feed_forward.w3.weight": (HIDDEN, DIM),
        f"layers.{_n}.attention_norm.weight": (DIM,),
        f"layers.{_n}.ffn_norm.weight": (DIM,),
    }

# What the other layouts call each part, spelled out and not derived from the tables under test.
GGUF = {
    "tok_embeddings": "token_embd", "norm": "output_norm", "output": "output",
    "layers": "blk", "attention.wq": "attn_q", "attention.wk": "attn_k", "attention.wv": "attn_v",
    "attention.wo": "attn_output", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up", "attention_norm": "attn_norm", "ffn_norm": "ffn_norm",
}  # fmt: skip
HF = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "layers": "model.layers", "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def spelled(key: str, words: dict[str, str]) -> str:
    """A canonical key in another layout's words."""
    if not key.startswith("layers."):
        return f"{words[key.removesuffix('.weight')]}.weight"
    layers, number, rest = key.removesuffix(".weight").split(".", 2)
    return f"{words[layers]}.{number}.{words[rest]}.weight"


@pytest.fixture
def canonical() -> dict[str, np.ndarray]:
    return models.random(CANONICAL)


def halves(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Interleaved pairs -> rotated halves, row by row as the two conventions define them."""
    out, head = np.empty_like(w), len(w) // n_heads
    for h in range(n_heads):
        for pair in range(head // 2):
            for side in range(2):
                out[h * head + side * head // 2 + pair] = w[h * head + 2 * pair + side]
    return out


def in_hf_order(key: str, w: np.ndarray) -> np.ndarray:
    heads = {"wq": HEADS, "wk": KV_HEADS}.get(key.split(".")[-2])
    return halves(w, heads) if heads else w


def equal(renamed: Checkpoint, canonical: dict[str, np.ndarray]) -> None:
    check(renamed, CANONICAL)
    for key, array in canonical.items():
        np.testing.assert_array_equal(renamed[key].numpy(), array)
        raw = renamed.entries[key].raw().view(np.float32)  # the same by the file's bytes
        np.testing.assert_array_equal(raw.reshape(array.shape), array)


def test_gguf_names_become_metas(canonical):
    arrays = {spelled(key, GGUF): w for key, w in canonical.items()}
    arrays["blk.0.attn_rot_embd.weight"] = np.ones(3, np.float32)
    equal(names.llama(models.checkpoint(arrays), HEADS, KV_HEADS), canonical)


def test_hf_names_become_metas_and_rows_become_pairs(canonical):
    arrays = {spelled(key, HF): in_hf_order(key, w) for key, w in canonical.items()}
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    arrays["model.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    equal(names.llama(models.checkpoint(arrays), HEADS, KV_HEADS), canonical)


def test_metas_names_stay(canonical):
    arrays = canonical | {"rope.freqs": np.ones(3, np.float32)}
    equal(names.llama(models.checkpoint(arrays), HEADS, KV_HEADS), canonical)


def test_hf_biases_are_reordered_like_their_rows():
    bias = np.arange(KV_HEADS * HEAD, dtype=np.float32)
    arrays = {
        "model.embed_tokens.weight": np.zeros((1, 1), np.float32),
        "model.layers.0.self_attn.k_proj.bias": halves(bias, KV_HEADS),
    }
    renamed = names.llama(models.checkpoint(arrays), HEADS, KV_HEADS)
    assert renamed["layers.0.attention.wk.bias"].tolist() == bias.tolist()


def test_missing_output_stays_missing(canonical):
    del canonical["output.weight"]
    p = Params(
        names.llama(models.checkpoint({spelled(k, HF): w for k, w in canonical.items()}), 4, 2)
    )
    assert "output" not in p and "tok_embeddings" in p


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.v_norm.weight",
        "xmodel.norm.weight",
        "model.norm.weight.x",
        "model.norm.weight\n",
        "model.layers.٣.input_layernorm.weight",
        "blk.0.attn_q.weight",
    ],
)
def test_key_that_no_row_matches_is_an_error(key):
    arrays = {name: np.zeros((2, 2), np.float32) for name in ("model.embed_tokens.weight", key)}
    with pytest.raises(WeightError, match="no row of the name table matches it"):
        names.llama(models.checkpoint(arrays), 1, 1)


def test_foreign_checkpoint_and_indivisible_rows_are_errors():
    zeros = np.zeros((6, 2), np.float32)
    with pytest.raises(WeightError, match="model: not a LLaMA checkpoint"):
        names.llama(models.checkpoint({"encoder.weight": zeros}), 1, 1)
    key = "model.layers.0.self_attn.q_proj.weight"
    for n_heads in (0, 2, 6):
        with pytest.raises(WeightError, match="its rows do not divide into heads"):
            arrays = {"model.embed_tokens.weight": zeros, key: zeros}
            names.llama(models.checkpoint(arrays), n_heads, 1)


METADATA = {
    "gguf": {
        "general.architecture": "llama",
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
    },
    "hf": {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
    "meta": {"n_heads": HEADS, "n_kv_heads": KV_HEADS},
}


def in_layout(layout: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Canonical arrays as a file of another layout has them, biases too."""
    words = {"gguf": GGUF, "hf": HF}.get(layout)
    if words is None:
        return arrays
    return {spelled(k, words): in_hf_order(k, w) if layout == "hf" else w
            for k, w in arrays.items()}  # fmt: skip


@pytest.mark.parametrize("target", METADATA)
@pytest.mark.parametrize("source", METADATA)
def test_every_layout_becomes_every_other_bit_for_bit(source, target, canonical):
    given = models.checkpoint(in_layout(source, canonical), METADATA[source])
    assert names.recognise(given) == ("llama", source)
    got = names.in_layout(given, target)
    assert got.metadata is given.metadata
    models.assert_equal(got, in_layout(target, canonical), tensors=True)


def test_rows_of_quantised_blocks_are_reordered_whole():
    """Q8_0: 34 bytes hold 32 values of one row, whatever the order of the rows."""
    raw = np.random.default_rng(0).integers(0, 256, (KV_HEADS * HEAD, 2 * 34), np.uint8)
    info = TensorInfo((KV_HEADS * HEAD, 64), "Q8_0", raw.size)
    entry = from_raw(info, lambda: raw.reshape(-1))
    layer = {"layers.0.attention.wk.weight": entry, "tok_embeddings.weight": entry}
    got = names.in_layout(Checkpoint(Path("m"), "test", METADATA["meta"], layer), "hf")
    key = "model.layers.0.self_attn.k_proj.weight"
    assert got.entries[key].raw().tobytes() == halves(raw, KV_HEADS).tobytes()
    back = names.canonical(got).entries["layers.0.attention.wk.weight"]
    assert back.raw().tobytes() == raw.tobytes()


def test_scaling_factors_of_rotation_are_never_lost(canonical):
    """A GGUF of Llama 3.2 has them as a tensor only: without it, long texts go wrong in silence."""
    arrays = in_layout("gguf", canonical) | {"rope_freqs.weight": np.ones(3, np.float32)}
    given = models.checkpoint(arrays, METADATA["gguf"])
    for layout in names.LAYOUTS["llama"]:
        assert "rope_freqs.weight" in names.in_layout(given, layout)


def test_head_counts_that_no_metadata_names_are_asked_for(canonical):
    arrays = in_layout("hf", canonical)
    with pytest.raises(WeightError, match="model: the number of attention heads is not named"):
        names.canonical(models.checkpoint(arrays, {"num_attention_heads": "4"}))
    assert names.canonical(models.checkpoint(in_layout("gguf", canonical)))  # whose rows stay


def test_other_architectures_are_not_taken_for_llama():
    arrays = {"token_embd.weight": np.zeros((2, 2), np.float32)}
    other = models.checkpoint(arrays, {"general.architecture": "mamba"})
    assert names.recognise(other) is None
    assert names.recognise(models.checkpoint(arrays)) == ("llama", "gguf")
    with pytest.raises(WeightError, match="no name table knows it.*llama .meta, hf, gguf.") as e:
        names.canonical(other)
    assert "\n" not in str(e.value)
    with pytest.raises(WeightError, match="llama has no layout 'ggml' .expected meta, hf, gguf"):
        names.in_layout(models.checkpoint(arrays), "ggml")


def test_real_model_has_exactly_the_canonical_keys(smollm2):
    renamed = names.llama(load(smollm2), 9, 3)
    layer = {"attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention_norm"}
    layer |= {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "ffn_norm"}
    wanted = {f"layers.{n}.{part}.weight" for n in range(30) for part in layer}
    assert set(renamed) == wanted | {"tok_embeddings.weight", "norm.weight"}
    assert renamed.info("layers.29.attention.wk.weight").shape == (192, 576)
