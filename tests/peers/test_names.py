"""Names and readers against those who write the files: transformers, diffusers, CTranslate2."""

from __future__ import annotations

import numpy as np
import pytest

from tests.peers import diffusion
from tests.weights import models
from tests.weights.sd import VERSIONS
from weights import WeightError, load, names
from weights.names.whisper import dims

pytestmark = pytest.mark.peers


def arrays_of(module, prefix: str = "") -> dict[str, np.ndarray]:
    return {prefix + key: t.detach().numpy() for key, t in module.state_dict().items()}


def tensors_of(checkpoint) -> dict:
    import torch

    return {k: torch.from_numpy(models.array(e).copy()) for k, e in checkpoint.entries.items()}


def randomised(module):
    """Every weight random: fresh models have zeros and ones, which hide mix-ups."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(0, 0.2)
    return module.eval()


def hf_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=30, attention_bias=True, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return randomised(LlamaForCausalLM(config))


def test_llamas_keys_are_transformers():
    model = hf_llama()
    given = models.checkpoint(arrays_of(model), model.config.to_dict())
    ours = names.canonical(given)
    models.assert_equal(names.in_layout(ours, "hf"), arrays_of(model))
    assert "layers.1.attention.wk.bias" in ours


def test_rows_of_queries_and_keys_are_in_metas_order():
    """The score of two positions is the same: rotated halves there, interleaved pairs here."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = hf_llama()
    ours = names.canonical(models.checkpoint(arrays_of(model), model.config.to_dict()))
    x = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(1))
    layer, inner = model.model.layers[0].self_attn, model.model
    cos, sin = inner.rotary_emb(x, torch.arange(5)[None])
    q = layer.q_proj(x).view(1, 5, 4, 6).transpose(1, 2)
    k = layer.k_proj(x).view(1, 5, 2, 6).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    wanted = (q @ k.repeat_interleave(2, 1).mT).detach().numpy()  # (1, H, 5, 5)

    def rotated(name: str, heads: int) -> np.ndarray:
        weight, bias = (models.array(ours.entries[f"{name}.{p}"]) for p in ("weight", "bias"))
        y = (x.numpy() @ weight.T + bias).reshape(1, 5, heads, 3, 2)
        turn = np.exp(1j * np.arange(5)[:, None] * 10000.0 ** (-np.arange(3) / 3))
        pairs = (y[..., 0] + 1j * y[..., 1]) * turn[None, :, None]
        return np.stack([pairs.real, pairs.imag], -1).reshape(1, 5, heads, 6).swapaxes(1, 2)

    q, k = rotated("layers.0.attention.wq", 4), rotated("layers.0.attention.wk", 2)
    got = q @ np.repeat(k, 2, axis=1).swapaxes(2, 3)
    np.testing.assert_allclose(got, wanted, atol=1e-5)  # float32 sums of 24 products, twice


def hf_whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=128, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=50,
        num_mel_bins=8, max_source_positions=20, max_target_positions=10,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return randomised(WhisperForConditionalGeneration(config))


def test_whispers_keys_are_transformers_and_openais():
    whisper = pytest.importorskip("whisper.model", reason="openai-whisper is the oracle")
    model = hf_whisper()
    theirs = arrays_of(model)
    ours = names.canonical(models.checkpoint(theirs, model.config.to_dict()))
    del theirs["proj_out.weight"]  # tied
    models.assert_equal(names.in_layout(ours, "hf"), theirs)
    reference = whisper.Whisper(whisper.ModelDimensions(**dims(ours)))
    reference.load_state_dict(tensors_of(ours), strict=True)
    import torch

    draw = torch.Generator().manual_seed(0)
    mel, ids = torch.randn(1, 8, 40, generator=draw), torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad():
        # The model takes 30 s only; the sizes of the tiny one say 40 frames.
        wanted = model.model.decoder(
            input_ids=ids, encoder_hidden_states=_encoded(model, mel)
        ).last_hidden_state
        wanted = (wanted @ model.model.decoder.embed_tokens.weight.T).numpy()
        got = reference.decoder(ids, reference.encoder(mel)).numpy()
    # Two implementations in float32: rounding, five layers deep.
    np.testing.assert_allclose(got, wanted, atol=2e-3, rtol=1e-3)


def _encoded(model, mel):
    return model.model.encoder(mel).last_hidden_state


@pytest.mark.parametrize("kind", [None, "float16", "bfloat16", "int8", "int8_float16", "int16"])
def test_ctranslate2s_files_hold_the_weights_they_were_made_of(kind, tmp_path):
    transformers = pytest.importorskip(
        "ctranslate2.converters.transformers", reason="CTranslate2 is the oracle"
    )
    spec = transformers.WhisperLoader().get_model_spec(hf_whisper())
    spec.register_vocabulary([str(k) for k in range(50)])
    spec.validate()
    spec.optimize(quantization=kind)
    (tmp_path / "m").mkdir()
    spec._serialize(str(tmp_path / "m" / "model.bin"))
    checkpoint = load(tmp_path / "m", "reference")
    ours = names.canonical(checkpoint)
    model = hf_whisper()  # quantising works in place, so made anew
    wanted = names.canonical(models.checkpoint(arrays_of(model), model.config.to_dict()))
    assert set(ours) == set(wanted) and dims(ours) == dims(wanted)
    # Of the largest weight: half a unit in the last place, or half a step of 1024 or of 127.
    limits = {None: 0, "float16": 2**-11, "bfloat16": 2**-8, "int16": 0.51 / 1024}
    largest = max(np.abs(models.array(entry)).max() for entry in wanted.entries.values())
    for key in wanted:
        error = np.abs(ours[key].float().numpy() - wanted[key].numpy()).max()
        assert error <= limits.get(kind, 0.51 / 127 + 2**-11) * largest, key


@pytest.mark.parametrize("version", VERSIONS)
def test_stable_diffusions_keys_are_diffusers(version):
    """Diffusers's own converters, given what we made of its models, give these back."""
    import torch
    from diffusers.loaders import single_file_utils as single

    parts = diffusion.parts(version)
    arrays: dict[str, np.ndarray] = {}
    for name, module in parts.items():
        arrays |= arrays_of(module, f"{name}.")
    ours = names.canonical(models.checkpoint(arrays))
    tensors = tensors_of(ours)
    got = {
        "unet": single.convert_ldm_unet_checkpoint(dict(tensors), dict(parts["unet"].config)),
        "vae": single.convert_ldm_vae_checkpoint(dict(tensors), dict(parts["vae"].config)),
    }
    for name, module in parts.items():
        if name.startswith("text"):
            prefix = next(k for k in tensors if k.endswith("token_embedding.weight") and
                          ("embedders.0" in k) == (name == "text_encoder" or version == "refiner")
                          or "cond_stage" in k)  # fmt: skip
            if ".transformer." in prefix:
                got[name] = single.convert_ldm_clip_checkpoint(dict(tensors))
            else:
                prefix = prefix.removesuffix("token_embedding.weight")
                got[name] = single.convert_open_clip_checkpoint(module, dict(tensors), prefix)
        wanted = {_short(key): t for key, t in module.state_dict().items()}
        found = {_short(key): t for key, t in got[name].items()}
        assert set(found) == set(wanted), name
        assert all(torch.equal(found[key], t) for key, t in wanted.items()), name
    back = {_short(key): models.array(e) for key, e in
            names.in_layout(ours, "diffusers").entries.items()}  # fmt: skip
    assert set(back) == {_short(key) for key in arrays}
    assert all(np.array_equal(back[_short(key)], w) for key, w in arrays.items())


def _short(key: str) -> str:
    """Without the word that some versions of transformers put before a text encoder's keys."""
    return key.removeprefix(".").replace("text_model.", "")


def test_a_key_that_transformers_would_not_know_is_refused():
    arrays = arrays_of(hf_llama()) | {"model.layers.0.self_attn.r_norm.weight": np.ones(6, "<f4")}
    given = models.checkpoint(arrays, {"num_attention_heads": 4, "num_key_value_heads": 2})
    with pytest.raises(WeightError, match="r_norm.weight': no row of the name table matches it"):
        names.canonical(given)
