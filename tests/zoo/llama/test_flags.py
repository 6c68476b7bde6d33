"""The flags of chat and complete."""

from __future__ import annotations

import pytest

from zoo.llama import flags
from zoo.llama.__main__ import parser
from zoo.llama.sampling import SamplingOptions


def sampling(*args: str) -> SamplingOptions:
    options = flags.options(parser().parse_args(["complete", "x", *args]))
    known = SamplingOptions.__dataclass_fields__
    return SamplingOptions(**{name: value for name, value in options.items() if name in known})


def test_flags_have_the_defaults_of_the_options():
    assert sampling() == SamplingOptions()


def test_every_sampling_option_has_its_flag_and_llama_cpps_spelling():
    found = sampling(
        *("--temp", "0.7", "--typical", "0.9", "--repeat-penalty", "1.1", "--repeat-last-n", "-1"),
        *("--presence-penalty", "-0.5", "--frequency_penalty=0.25", "--mirostat", "2"),
        *("--mirostat-ent", "4", "--mirostat-lr", "0.2", "--top-k", "7", "--top-p", "0.5"),
        *("--min-p", "0", "--logit-bias", "12+1.5", "--logit-bias=7-inf", "--logit_bias", "3-2"),
    )
    assert found == SamplingOptions(
        temperature=0.7, top_k=7, top_p=0.5, min_p=0, typical_p=0.9, repeat_penalty=1.1,
        frequency_penalty=0.25, presence_penalty=-0.5, repeat_last_n=-1, mirostat=2,
        mirostat_tau=4, mirostat_eta=0.2, logit_bias={12: 1.5, 7: -float("inf"), 3: -2},
    )  # fmt: skip


@pytest.mark.parametrize("text", ["12", "+3", "x+1", "12+", "12+inf", "1.5+2", "12-x"])
def test_logit_bias_that_is_none_is_one_line(text, capsys):
    with pytest.raises(SystemExit):
        sampling("--logit-bias", text)
    err = capsys.readouterr().err
    assert "not like 1234+2" in err and err.count("\n") == 1
