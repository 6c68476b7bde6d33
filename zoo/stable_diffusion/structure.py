"""The keys and shapes that a checkpoint has, from the few numbers that differ between models.

These numbers are read off the keys and off one shape each, so that a tensor that is missing or
has another shape than its neighbours ask for is found before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from weights import Checkpoint, WeightError

UNET, VAE = "model.diffusion_model.", "first_stage_model."
PER_LEVEL = 2  # residual layers of a level on the way down, in every version
LEVELS = 4  # of the autoencoder, whose latents are 8 times smaller than pictures
Shapes = Iterator[tuple[str, tuple[int, ...]]]

# Where the text encoders of each version are, and whether they are OpenCLIP's.
TEXT = {
    "1": (("cond_stage_model.transformer.text_model.", False),),
    "2": (("cond_stage_model.model.", True),),
    "xl": (
        ("conditioner.embedders.0.transformer.text_model.", False),
        ("conditioner.embedders.1.model.", True),
    ),
}


class _Keys:
    """What the keys of a checkpoint say."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.counts: dict[str, int] = {}
        for key in checkpoint:
            for number in re.finditer(r"(?<=\.)\d+(?=\.)", key):
                prefix = key[: number.start()]
                self.counts[prefix] = max(self.counts.get(prefix, 0), int(number[0]) + 1)

    def count(self, prefix: str) -> int:
        """How many numbered children there are under `prefix`; gaps count."""
        return self.counts.get(prefix, 0)

    def size(self, key: str, axis: int) -> int:
        """One size of a tensor; WeightError when it isn't there or has too few axes."""
        if key not in self.checkpoint:
            raise WeightError(f"no key '{key}'", file=self.checkpoint.path)
        shape = self.checkpoint.info(key).shape
        if axis >= len(shape):
            problem = f"it has no axis {axis}"
            raise WeightError(problem, file=self.checkpoint.path, tensor=key, got=shape)
        return shape[axis]


def expected(ours: Checkpoint, version: str) -> dict[str, tuple[int, ...]]:
    """Every key of a canonical checkpoint of a version ("1", "2" or "xl") -> its shape."""
    keys = _Keys(ours)
    shapes: dict[str, tuple[int, ...]] = {}
    dims, pooled = [], 0
    for prefix, openclip in TEXT[version]:
        table = "token_embedding" if openclip else "embeddings.token_embedding"
        vocab, dim = (keys.size(f"{prefix}{table}.weight", axis) for axis in (0, 1))
        dims.append(dim)
        projection = f"{prefix}text_projection"
        pooled = keys.size(projection, 1) if version == "xl" and openclip else 0
        shapes |= (_openclip if openclip else _clip)(keys, prefix, vocab, dim)
        if pooled or projection in ours:  # SD 2 does without it
            shapes[projection] = (dim, keys.size(projection, 1))
    shapes |= _unet(keys, sum(dims), version)
    shapes |= _vae(keys)
    return shapes


def _layer(name: str, out: int, *ins: int) -> Shapes:
    yield f"{name}.weight", (out, *ins)
    yield f"{name}.bias", (out,)


def _conv(name: str, out: int, ins: int, size: int = 3) -> Shapes:
    yield from _layer(name, out, ins, size, size)


def _unet(keys: _Keys, context: int, version: str) -> dict[str, tuple[int, ...]]:
    """The UNet's, for prompts of `context` channels."""
    ins_key = f"{UNET}input_blocks.0.0.weight"
    width, ins = keys.size(ins_key, 0), keys.size(ins_key, 1)
    steps = PER_LEVEL + 1
    firsts = [1 + steps * level for level in range(keys.count(f"{UNET}input_blocks.") // steps)]
    down = f"{UNET}input_blocks."
    widths = [keys.size(f"{down}{n}.0.in_layers.2.weight", 0) for n in firsts]
    depths = [keys.count(f"{down}{n}.1.transformer_blocks.") for n in firsts]
    middle = keys.count(f"{UNET}middle_block.1.transformer_blocks.")
    out = list(_conv("input_blocks.0.0", width, ins))
    time = 4 * width

    def layers(block: str, ins: int, outs: int, depth: int) -> None:
        out.extend(_residual(f"{block}.0", ins, outs, time))
        if depth:
            out.extend(_transformer(f"{block}.1", outs, context, depth, version != "1"))

    kept, channels, n = [width], width, 1
    for level, (wide, depth) in enumerate(zip(widths, depths)):
        for _ in range(PER_LEVEL):
            layers(f"input_blocks.{n}", channels, wide, depth)
            channels, n = wide, n + 1
            kept.append(wide)
        if level < len(widths) - 1:
            out += _conv(f"input_blocks.{n}.0.op", wide, wide)
            kept.append(wide)
            n += 1
    layers("middle_block", channels, channels, middle)
    out += _residual("middle_block.2", channels, channels, time)
    n = 0
    for level, (wide, depth) in reversed(list(enumerate(zip(widths, depths)))):
        for j in range(steps):
            layers(f"output_blocks.{n}", channels + kept.pop(), wide, depth)
            channels = wide
            if level and j == PER_LEVEL:
                out += _conv(f"output_blocks.{n}.{2 if depth else 1}.conv", wide, wide)
            n += 1
    out += _layer("time_embed.0", time, width)
    out += _layer("time_embed.2", time, time)
    if version == "xl":  # the pooled prompt and the sizes
        out += _layer("label_emb.0.0", time, keys.size(f"{UNET}label_emb.0.0.weight", 1))
        out += _layer("label_emb.0.2", time, time)
    out += _layer("out.0", width)
    out += _conv("out.2", keys.size(f"{UNET}out.2.weight", 0), width)
    return {UNET + name: shape for name, shape in out}


def _residual(name: str, ins: int, outs: int, time: int) -> Shapes:
    yield from _layer(f"{name}.in_layers.0", ins)
    yield from _conv(f"{name}.in_layers.2", outs, ins)
    yield from _layer(f"{name}.emb_layers.1", outs, time)
    yield from _layer(f"{name}.out_layers.0", outs)
    yield from _conv(f"{name}.out_layers.3", outs, outs)
    if ins != outs:
        yield from _conv(f"{name}.skip_connection", outs, ins, 1)


def _transformer(name: str, c: int, context: int, depth: int, linear: bool) -> Shapes:
    yield from _layer(f"{name}.norm", c)
    for projection in ("proj_in", "proj_out"):
        yield from _layer(f"{name}.{projection}", c, c, *(() if linear else (1, 1)))
    for n in range(depth):
        block = f"{name}.transformer_blocks.{n}"
        for attention, seen in (("attn1", c), ("attn2", context)):
            yield f"{block}.{attention}.to_q.weight", (c, c)
            yield f"{block}.{attention}.to_k.weight", (c, seen)
            yield f"{block}.{attention}.to_v.weight", (c, seen)
            yield from _layer(f"{block}.{attention}.to_out.0", c, c)
        yield from _layer(f"{block}.ff.net.0.proj", 8 * c, c)
        yield from _layer(f"{block}.ff.net.2", c, 4 * c)
        for norm in ("norm1", "norm2", "norm3"):
            yield from _layer(f"{block}.{norm}", c)


def _vae(keys: _Keys) -> dict[str, tuple[int, ...]]:
    """The autoencoder's."""
    latents = keys.size(f"{VAE}post_quant_conv.weight", 0)
    levels = keys.count(f"{VAE}encoder.down.")
    first = f"{VAE}encoder.down.{{}}.block.0.conv1.weight"
    widths = [keys.size(first.format(level), 0) for level in range(levels)]
    if levels != LEVELS:
        problem, expected = "its autoencoder has another number of levels", LEVELS
        raise WeightError(problem, file=keys.checkpoint.path, expected=expected, got=levels)
    last = widths[-1]
    out = [*_conv("quant_conv", 2 * latents, 2 * latents, 1)]
    out += _conv("post_quant_conv", latents, latents, 1)

    def half(name: str, ins: int, first: int, final: int, outs: int) -> None:
        out.extend(_conv(f"{name}.conv_in", first, ins))
        for block in ("block_1", "block_2"):
            out.extend(_vae_residual(f"{name}.mid.{block}", last, last))
        out.extend(_layer(f"{name}.mid.attn_1.norm", last))
        for part in ("q", "k", "v", "proj_out"):
            out.extend(_conv(f"{name}.mid.attn_1.{part}", last, last, 1))
        out.extend(_layer(f"{name}.norm_out", final))
        out.extend(_conv(f"{name}.conv_out", outs, final))

    half("encoder", 3, widths[0], last, 2 * latents)
    half("decoder", latents, last, widths[0], 3)
    channels = widths[0]
    for level, wide in enumerate(widths):
        for n in range(PER_LEVEL):
            out += _vae_residual(f"encoder.down.{level}.block.{n}", channels, wide)
            channels = wide
        if level < levels - 1:
            out += _conv(f"encoder.down.{level}.downsample.conv", wide, wide)
    for level, wide in reversed(list(enumerate(widths))):
        for n in range(PER_LEVEL + 1):
            out += _vae_residual(f"decoder.up.{level}.block.{n}", channels, wide)
            channels = wide
        if level:
            out += _conv(f"decoder.up.{level}.upsample.conv", wide, wide)
    return {VAE + name: shape for name, shape in out}


def _vae_residual(name: str, ins: int, outs: int) -> Shapes:
    yield from _layer(f"{name}.norm1", ins)
    yield from _conv(f"{name}.conv1", outs, ins)
    yield from _layer(f"{name}.norm2", outs)
    yield from _conv(f"{name}.conv2", outs, outs)
    if ins != outs:
        yield from _conv(f"{name}.nin_shortcut", outs, ins, 1)


def _clip(keys: _Keys, prefix: str, vocab: int, dim: int) -> dict[str, tuple[int, ...]]:
    """A text encoder's under Hugging Face's names."""
    positions = keys.size(f"{prefix}embeddings.position_embedding.weight", 0)
    out = [("embeddings.token_embedding.weight", (vocab, dim))]
    out.append(("embeddings.position_embedding.weight", (positions, dim)))
    for n in range(keys.count(f"{prefix}encoder.layers.")):
        layer = f"encoder.layers.{n}"
        inner = keys.size(f"{prefix}{layer}.mlp.fc1.weight", 0)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            out += _layer(f"{layer}.self_attn.{name}", dim, dim)
        out += [*_layer(f"{layer}.layer_norm1", dim), *_layer(f"{layer}.layer_norm2", dim)]
        out += [*_layer(f"{layer}.mlp.fc1", inner, dim), *_layer(f"{layer}.mlp.fc2", dim, inner)]
    out += _layer("final_layer_norm", dim)
    return {prefix + name: shape for name, shape in out}


def _openclip(keys: _Keys, prefix: str, vocab: int, dim: int) -> dict[str, tuple[int, ...]]:
    """A text encoder's under OpenCLIP's names."""
    out = [("token_embedding.weight", (vocab, dim))]
    out.append(("positional_embedding", (keys.size(f"{prefix}positional_embedding", 0), dim)))
    for n in range(keys.count(f"{prefix}transformer.resblocks.")):
        layer = f"transformer.resblocks.{n}"
        inner = keys.size(f"{prefix}{layer}.mlp.c_fc.weight", 0)
        out += [(f"{layer}.attn.in_proj_weight", (3 * dim, dim))]
        out += [(f"{layer}.attn.in_proj_bias", (3 * dim,))]
        out += _layer(f"{layer}.attn.out_proj", dim, dim)
        out += [*_layer(f"{layer}.ln_1", dim), *_layer(f"{layer}.ln_2", dim)]
        out += _layer(f"{layer}.mlp.c_fc", inner, dim)
        out += _layer(f"{layer}.mlp.c_proj", dim, inner)
    out += _layer("ln_final", dim)
    return {prefix + name: shape for name, shape in out}
