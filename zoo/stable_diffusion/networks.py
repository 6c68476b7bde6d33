"""The networks at work: NumPy in, NumPy out, compiled on first use for each size of picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine import Tensor
from engine.functional import layer_norm
from weights import Params
from zoo.errors import UsageError
from zoo.stable_diffusion import clip, unet
from zoo.stable_diffusion.autoencoder import Autoencoder, Progress, Runner

LENGTH = 77  # tokens of a chunk


@dataclass(frozen=True)
class Kind:
    """What a pipeline has to know of a model.

    version: "1", "2" or "xl". prediction: "epsilon" or "v". scale: latents that the UNet sees are
    the autoencoder's times this. size: pixels each way that it was trained with. channels: of the
    UNet's input; 9 for inpainting. scheduler: diffusers's configuration, empty for single files.
    """

    version: str
    prediction: str
    scale: float
    size: int
    channels: int
    unet: unet.Config
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inpainting(self) -> bool:
        return self.channels == 9


class Networks:
    """The text encoders, UNet and autoencoder of a checkpoint with canonical names.

    dtype "f32" computes as the weights are, "auto" multiplies in what the device is fast at.
    """

    def __init__(
        self, params: Params, kind: Kind, device: str | None = None, dtype: str = "auto"
    ) -> None:
        self.params, self.kind, self.device, self.dtype = params, kind, device, dtype
        config, p = kind.unet, params.model.diffusion_model
        self._program = Runner(device, dtype)
        self._unet = self._program(lambda *inputs: unet.unet(p, config, *inputs))
        self.autoencoder = Autoencoder(params.first_stage_model, device, dtype)
        self._texts: dict[int, Callable] = {}

    # --- text --------------------------------------------------------------------------------

    @property
    def encoders(self) -> list[Params]:
        """The trees of the text encoders, one or two."""
        p = self.params
        if self.kind.version == "1":
            return [p.cond_stage_model.transformer.text_model]
        if self.kind.version == "2":
            return [p.cond_stage_model.model]
        first, second = p.conditioner.embedders
        return [first.transformer.text_model, second.model]

    @property
    def dims(self) -> tuple[int, ...]:
        """The channels of each text encoder."""
        return tuple(_table(p).shape[1] for p in self.encoders)

    @property
    def vocabulary(self) -> int:
        """Token ids from here on are of textual inversion."""
        return _table(self.encoders[0]).shape[0]

    def encode_text(
        self,
        ids: Sequence[Sequence[int]] | np.ndarray,
        clip_skip: int | None = None,
        extra: Sequence[np.ndarray] = (),
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The states (B, n * 77, C) of prompts of n chunks, ids (B, n * 77); pooled (B, C2) for XL.

        clip_skip counts layers from the end as A1111 does: 1 is the last. None takes what the
        version was trained with: the last of SD 1, the last but one of SD 2 and XL. Pooled is the
        first chunk. `extra` has the vectors of textual inversion, (vectors, dim) for each encoder:
        id `vocabulary + i` is row i. What stands behind the first end token of a chunk is padding,
        for each encoder its own. UsageError for a clip_skip or ids that can't be.
        """
        ids = np.asarray(ids, np.int32)
        if ids.ndim != 2 or not ids.size or ids.shape[1] % LENGTH:
            raise UsageError(f"ids have the shape (B, n * {LENGTH}), got {ids.shape}")
        rows = min((len(table) for table in extra), default=0)
        if ids.min() < 0 or ids.max() >= self.vocabulary + rows:
            raise UsageError(f"token ids are from 0 to {self.vocabulary + rows - 1}")
        default = 1 if self.kind.version == "1" else 2
        back = default if clip_skip is None else clip_skip
        chunks = ids.reshape(-1, LENGTH)
        end = self.vocabulary - 1
        last = np.where((chunks == end).any(1), (chunks == end).argmax(1), LENGTH - 1)
        states, pooled = [], None
        for n, p in enumerate(self.encoders):
            pad = 0 if "transformer" in p else end  # OpenCLIP's was trained with 0
            own = np.where(np.arange(LENGTH) > last[:, None], pad, chunks).astype(np.int32)
            vectors = np.zeros((*own.shape, self.dims[n]), np.float32)
            if rows:
                vectors[own > end] = np.asarray(extra[n], np.float32)[own[own > end] - end - 1]
            state, *more = self._text(n, back)(own, vectors, last)
            states.append(state)
            if more:
                pooled = more[0].reshape(len(ids), -1, more[0].shape[-1])[:, 0]
        return np.concatenate(states, -1).reshape(*ids.shape, -1), pooled

    def _text(self, n: int, back: int) -> Callable:
        """The program of text encoder n that gives its `back`th state from the end."""
        p = self.encoders[n]
        openclip = "transformer" in p
        layers = p.transformer.resblocks if openclip else p.encoder.layers
        # Diffusers's SD 2 lacks the last layer, which nothing reads; with it went the projection.
        lacks = int(openclip and "text_projection" not in p)
        if not 1 + lacks <= back <= len(layers) + lacks:
            most = len(layers) + lacks
            raise UsageError(f"clip skip is from {1 + lacks} to {most} here, got {back}")
        if (n, back) in self._texts:
            return self._texts[n, back]
        xl, norm = self.kind.version == "xl", p.ln_final if openclip else p.final_layer_norm

        def text(ids: Tensor, extra: Tensor, last: Tensor) -> list[Tensor]:
            states = (clip.openclip if openclip else clip.hugging_face)(p, ids, extra)
            state = states[lacks - back]
            if xl and openclip:
                return [state, clip.pooled(p, states[-1], last)]
            return [state if xl else layer_norm(norm, state)]

        self._texts[n, back] = made = self._program(text, "high" if self.dtype == "auto" else "f32")
        return made

    # --- pictures ----------------------------------------------------------------------------

    def unet(
        self,
        latent: np.ndarray,
        timestep: float | np.ndarray,
        context: np.ndarray,
        pooled: np.ndarray | None = None,
        sizes: np.ndarray | None = None,
    ) -> np.ndarray:
        """The noise (or v) that is predicted in latents (B, C, H, W) at a time or times (B,).

        context (B, S, dim) and, for XL, pooled (B, dim) and sizes (B, 6) as in `unet.unet`.
        UsageError for latents of another number of channels, or an XL without those.
        """
        if latent.ndim != 4 or latent.shape[1] != self.kind.channels:
            expected = f"(B, {self.kind.channels}, H, W)"
            raise UsageError(f"the UNet's latents have the shape {expected}, got {latent.shape}")
        times = np.broadcast_to(np.asarray(timestep, np.float32), (len(latent),))
        inputs = [latent, times, context]
        if self.kind.version == "xl":
            if pooled is None or sizes is None:
                raise UsageError("Stable Diffusion XL needs pooled prompts and sizes")
            inputs += [pooled, sizes]
        return self._unet(*inputs)

    def decode(
        self, latent: np.ndarray, tiled: bool | None = None, progress: Progress | None = None
    ) -> np.ndarray:
        """Latents in the UNet's scale (B, 4, H, W) -> pictures (B, 3, 8 H, 8 W), about -1 to 1.

        tiled None tiles where the whole would take more than half of the memory that is free.
        UserError when the result isn't finite in float32 either.
        """
        if latent.ndim != 4 or latent.shape[1] != 4:
            raise UsageError(f"latents have the shape (B, 4, H, W), got {latent.shape}")
        z = np.asarray(latent, np.float32) / np.float32(self.kind.scale)
        return self.autoencoder.decode(z, tiled, progress)

    def encode(
        self,
        image: np.ndarray,
        noise: np.ndarray | None = None,
        tiled: bool | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Pictures (B, 3, H, W) from -1 to 1 -> latents in the UNet's scale (B, 4, H/8, W/8).

        The mean of what the encoder says; with normal `noise` of that shape a sample. UsageError
        for sizes that aren't multiples of 8.
        """
        if image.ndim != 4 or image.shape[1] != 3 or image.shape[2] % 8 or image.shape[3] % 8:
            expected = "(B, 3, H, W) with H and W multiples of 8"
            raise UsageError(f"pictures have the shape {expected}, got {image.shape}")
        said = self.autoencoder.encode(image, tiled, progress)
        mean, log_variance = np.split(said, 2, axis=1)
        if noise is not None:
            mean = mean + np.exp(0.5 * np.clip(log_variance, -30, 20)) * noise
        return (mean * np.float32(self.kind.scale)).astype(np.float32)


def _table(p: Params) -> Tensor:
    return (p if "token_embedding" in p else p.embeddings).token_embedding.weight
