"""Learning rates for docs, configs, messages, planner and examples.

A rate is the peak of a schedule with warm-up. There are three kinds:

- ``Rate.start`` was measured in short fine-tunes of one small model on three data sets
  (``python -m benchmarks quality``, benchmarks/results/quality). It is the lowest rate whose worst
  case over the data sets is within ``TOLERANCE`` of the best rate's worst case. Larger models and
  longer runs need lower rates.
- ``Rate.published`` was published for models of about 7B parameters, or for the model in its
  ``run``. Each value was checked at its source.
- The default of an optimizer's ``lr`` is its authors' (``ds_ext.rules``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A published rate, and its setting."""

    lr: tuple[float, ...]  # one rate, or the lowest and the highest
    run: str  # the model and the task
    schedule: str
    weight_decay: str
    source: str  # a URL
    is_start: bool = True  # for fine-tuning with default params, so that others may start at it


@dataclass(frozen=True)
class Rate:
    """The rates of an optimizer."""

    start: float
    params: Mapping[str, Any] = field(default_factory=dict)  # non-default ones of the measurement
    published: Published | None = None

    @property
    def others(self) -> tuple[float, float]:
        """The rates to try next."""
        return self.start / 2, self.start * 2


MODEL = "135M"  # parameters of the model in the measurements
TOLERANCE = 0.025  # fraction of the gain from fine-tuning
LARGE = 10**9  # parameters of a model from which on published rates are used
LORA = "lora"  # adapters trained by AdamW: the only entry that is not an optimizer

_COSINE = "cosine, 3 % warm-up"
_ALPACA = "https://github.com/tatsu-lab/stanford_alpaca"
_ADAMW = Published((2e-5,), "LLaMA 7B, instructions (Alpaca)", _COSINE, "0", _ALPACA)
_ADALOMO = Published(
    (5e-4,),
    "LLaMA 7B, instructions; 1e-3 for further pre-training",
    "linear, 3 % warm-up; cosine for further pre-training",
    "0",
    "https://github.com/OpenLMLab/LOMO/tree/main/adalomo",
)
_NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/tree/master"
_APOLLO = "https://github.com/zhuhanqing/APOLLO/tree/main/scripts"

RATES: dict[str, Rate] = {  # by the lower-case name of the optimizer
    "lomo": Rate(
        3e-3,
        published=Published(
            (3e-2,),
            "LLaMA 7B, the task WiC of SuperGLUE, clipped to a norm of 1",
            "linear, 10 % warm-up",
            "0",
            "https://github.com/OpenLMLab/LOMO/blob/main/lomo/config/args_lomo.yaml",
            is_start=False,
        ),
    ),
    "adalomo": Rate(1e-3, published=_ADALOMO),
    "adafactor": Rate(  # with these params its steps equal AdaLomo's
        1e-3,
        {"relative_step": False},
        Published(
            (1e-3,),
            "T5 up to 11B, fine-tuning",
            "constant",
            "0",
            "https://github.com/google-research/text-to-text-transfer-transformer#fine-tuning",
        ),
    ),
    "came": Rate(
        1e-5,
        published=Published(
            (2e-5,),
            "LLaMA 7B, instructions, Alpaca's script with CAME for AdamW; from scratch, its "
            "authors take 0.5 to 0.9 of AdamW's rate",
            _COSINE,
            "0",
            "https://github.com/yangluo7/CAME",
        ),
    ),
    "lamb": Rate(
        3e-4,
        published=Published(
            (6e-3,),
            "no model of 7B; BERT-Large from scratch, 65536 rows of 128 tokens, NVIDIA's LAMB",
            "root of the share of steps left, 28 % warm-up",
            "0.01",
            f"{_NVIDIA}/PyTorch/LanguageModeling/BERT",
            is_start=False,
        ),
    ),
    "galoreadamw": Rate(
        1e-3,
        published=Published(  # for Llama 3: llama-factory-finetune/galore, at _APOLLO
            (5e-3,),
            'LLaMA 7B from scratch, with "rank": 1024, "scale": 0.25, clipped to a norm of 1; '
            'Llama 3 8B, instructions, by APOLLO\'s authors: 1e-5, with "rank": 128, "scale": 2',
            "cosine, 10 % warm-up",
            "0",
            "https://github.com/jiaweizzhao/GaLore/blob/master/scripts/benchmark_c4/llama_7b.sh",
            is_start=False,
        ),
    ),
    "adamw": Rate(1e-4, published=_ADAMW),
    "flashadamw": Rate(1e-4, published=_ADAMW),
    "lion": Rate(
        1e-4,
        published=Published(
            (1e-4,),
            "training a language model of 7.5B; its authors take 1/10 to 1/3 of AdamW's rate",
            "as AdamW",
            "0.01, and in general 3 to 10 times AdamW's",
            "https://github.com/google/automl/tree/master/lion",
        ),
    ),
    "sinkgd": Rate(1e-3),
    "scale": Rate(
        1e-4,
        published=Published(
            (1e-4,),
            "LLaMA 7B from scratch; 2e-4 for 1B; vectors by Adam, 1e-3",
            "cosine, 10 % warm-up",
            "0",
            "https://github.com/OptimAI-Lab/Minimalist_LLM_Pretraining/tree/main/scripts",
            is_start=False,
        ),
    ),
    "apollo": Rate(
        3e-4,
        published=Published(
            (1e-5,),
            'Llama 3 8B, instructions, with "rank": 128, "scale": 32; LLaMA 7B from scratch 1e-2, '
            'with "rank": 256, "scale": 1',
            "cosine, 10 % warm-up",
            "0",
            _APOLLO,
            is_start=False,
        ),
    ),
    "apollomini": Rate(
        3e-4,
        published=Published(
            (1e-2,),
            'LLaMA 7B from scratch, with "scale": 128',
            "cosine, 10 % warm-up",
            "0",
            _APOLLO,
            is_start=False,
        ),
    ),
    "muon": Rate(
        3e-4,
        {"adjust_lr_fn": "match_rms_adamw"},
        Published(
            (2e-5,),
            "Qwen 2.5 7B, instructions; Moonlight's authors take AdamW's rate",
            "cosine to a tenth, no warm-up named",
            "not named; 0.1 from scratch",
            "https://arxiv.org/abs/2502.16982",
        ),
    ),
    LORA: Rate(
        1e-3,
        published=Published(
            (2e-4,),
            "LLaMA 7B and 13B, QLoRA; 1e-4 for 33B and 65B",
            "constant",
            "0",
            "https://github.com/artidoro/qlora/tree/main/scripts",
        ),
    ),
}


def for_size(optimizer: str, parameters: int) -> tuple[float, str] | None:
    """Returns the rate to start a fine-tune at, and where it is from; None if none is known.

    Models of at least ``LARGE`` parameters get the published rate, if it is for fine-tuning with
    default params. Others get the measured rate.

    Args:
        optimizer: the optimizer's name; case does not matter.
        parameters: the number of the model's parameters.
    """
    rate = RATES.get(optimizer.lower())
    if rate is None:
        return None
    if parameters < LARGE:
        return rate.start, f"measured on a model of {MODEL} parameters"
    published = rate.published
    if published is not None and published.is_start:
        return published.lr[0], f"published for {published.run}: {published.source}"
    return rate.start, f"measured on a model of {MODEL} parameters; larger ones need lower rates"


def advice(optimizer: str) -> str:
    """Returns "start at 1e-3, try 5e-4 and 2e-3", the measured model, and published rates.

    Returns "" for an optimizer without a rate.

    Args:
        optimizer: the optimizer's name; case does not matter.
    """
    rate = RATES.get(optimizer.lower())
    if rate is None:
        return ""
    low, high = map(shown, rate.others)
    params = "".join(f", with {json.dumps(k)}: {json.dumps(v)}" for k, v in rate.params.items())
    measured = f"measured on a model of {MODEL}{params}"
    told = f"start at {shown(rate.start)}, try {low} and {high} ({measured})"
    if rate.published is None:
        return told
    return f"{told}; published: {span(rate.published)} ({rate.published.run})"


def span(published: Published) -> str:
    """Returns a published rate or range as text: "1e-5 to 2e-5"."""
    return " to ".join(map(shown, published.lr))


def shown(rate: float) -> str:
    """Returns a rate as text in the form of papers: 5e-4."""
    digits, _, power = f"{rate:.2e}".partition("e")
    return f"{digits.rstrip('0').removesuffix('.')}e{int(power)}"
