"""The client programs, their environments and what is run of each."""

from typing import NamedTuple


class Run(NamedTuple):
    """What to run of a program: a row of the table."""

    package: str  # the distribution, whose version the table shows
    what: str
    command: str  # {here} stands for tests/tools/clients


class Client(NamedTuple):
    """An environment: the programs to install into it, and what to run there."""

    name: str  # on the command line
    packages: tuple[str, ...]  # the arguments of one `pip install` each
    runs: tuple[Run, ...]
    minutes: float = 10  # the limit of each run
    python: str = "3.11"
    deepspeed: str = "0.19.8"
    torch: str = "2.13.0"


RANKS = "torchrun --nproc_per_node 2 {here}"
TRAINER = f"{RANKS}/run_trainer.py"
CLIENTS = (
    Client(
        "huggingface",
        (
            "transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 trl==1.16.0 "
            "sentence-transformers==6.2.0 diffusers==0.42.1",
        ),
        (
            Run("trl", "SFTTrainer", f"{TRAINER} sft 3"),
            Run("trl", "DPOTrainer", f"{TRAINER} dpo 3"),
            Run("transformers", "Trainer, BERT", f"{TRAINER} bert 3"),
            Run("transformers", "Trainer, T5", f"{TRAINER} t5 3"),
            Run("transformers", "Trainer, ViT", f"{TRAINER} vit 2"),
            Run("sentence-transformers", "SentenceTransformerTrainer", f"{TRAINER} st 2"),
            Run("diffusers", "UNet2DModel, accelerate's loop", f"{RANKS}/run_diffusers.py"),
        ),
    ),
    Client(
        "torchtune",
        ("torchtune==0.6.1 torchao==0.10.0 transformers==5.23.0",),
        (Run("torchtune", "full_finetune_single_device", "python {here}/run_torchtune.py"),),
    ),
    Client(
        "axolotl",
        ("axolotl==0.21.0 transformers==5.20.1 trl==1.14.1 peft==0.21.2 accelerate==1.15.0",),
        (Run("axolotl", "full SFT, plugin", "python {here}/run_command.py axolotl"),),
        minutes=15,
        python="3.12",
    ),
    Client(  # --no-deps: without torchaudio, torchvision and the web interface
        "llama-factory",
        (
            "--no-deps llamafactory==0.9.5",
            "transformers==5.6.0 accelerate==1.11.0 datasets==4.0.0 peft==0.18.1 trl==0.24.0",
            "torchdata==0.11.0 tyro==0.8.14 av==16.0.0 matplotlib fire omegaconf pandas scipy",
            "sentencepiece tiktoken protobuf",
        ),
        (Run("llamafactory", "full SFT, YAML", "python {here}/run_command.py llamafactory"),),
    ),
    Client(
        "ms-swift",
        ("ms-swift==4.6.0 transformers==5.19.0 trl==0.29.1 peft==0.20.0 datasets==4.8.4",),
        (Run("ms-swift", "full SFT, plugin", "python {here}/run_command.py swift"),),
    ),
    Client(  # --no-deps: without what its trainers need of CUDA
        "verl",
        (
            "--no-deps verl==0.9.1",
            "transformers==5.10.2 accelerate==1.15.0 tensordict==0.10.0 torchdata==0.11.0",
            "omegaconf hydra-core ray codetiming pandas numpy<2.4",
        ),
        (Run("verl", "build_optimizer", "python {here}/run_verl.py"),),
    ),
)
