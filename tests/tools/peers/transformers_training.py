"""transformers' training test, which its archive has as a mixin, with a small Llama."""

import unittest

import test_training_mixin
from transformers import LlamaConfig, LlamaForCausalLM


class Llama:
    """What the mixin asks of transformers' own class for the tests of a model."""

    causal_lm_class = LlamaForCausalLM

    def get_config(self):
        return LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
        )

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"input_ids": None}


class LlamaTraining(test_training_mixin.TrainingTesterMixin, unittest.TestCase):
    model_tester = Llama()
    all_model_classes = (LlamaForCausalLM,)
