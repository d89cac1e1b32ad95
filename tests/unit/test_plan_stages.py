"""What ``plan`` takes for the stages of a pipeline."""

import argparse
import itertools
import random

import pytest
import transformers

from ds_ext.planner import memory, models, options, stages
from tests.common.ranks import message


def largest(sizes, ends):
    return max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *ends, len(sizes)]))


def test_the_largest_stage_is_as_small_as_any_cut_makes_it():
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.randint(1, 20) for _ in range(rng.randint(2, 9))]
        layers = [{f"{i}": (n,)} for i, n in enumerate(sizes)]
        for n in range(1, len(sizes) + 1):
            made = stages.cut(layers, n)
            assert [name for stage in made for name in stage] == [f"{i}" for i in range(len(sizes))]
            assert len(made) == n and all(made)
            cuts = itertools.combinations(range(1, len(sizes)), n - 1)
            assert max(map(memory.elements, made)) == min(largest(sizes, c) for c in cuts)


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_are_those_of_the_forward_pass(is_tied):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 30, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "tie_word_embeddings": is_tied}
    model = models.skeleton(transformers.LlamaConfig(**sizes, **heads))
    shapes = memory.shapes_of(model)
    found = stages.layers(shapes, is_tied)
    assert [len(layer) for layer in found] == [1, 9, 9, 9, 2]
    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    assert found[0].keys() == {"model.embed_tokens.weight"}
    assert found[-1].keys() == {"model.norm.weight", head}
    whole = sum(map(memory.elements, found))
    assert whole == memory.elements(shapes) + (240 if is_tied else 0)
    assert memory.elements(stages.largest(model, shapes, 5)) == memory.elements(found[1])


REFUSED = {
    "--stage 3": "pipelines support only ZeRO stages 0 and 1",
    "--seq 128": "remove --seq",
    "--lora 8": "remove --lora",
}


def test_what_a_pipeline_has_not_is_refused():
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    for given, told in REFUSED.items():
        args = f"--model smollm2-135m --pipeline-stages 4 {given}".split()
        assert told in message(lambda: options.read(parser.parse_args(args)))  # noqa: B023
    asked = options.read(parser.parse_args("--model x --pipeline-stages 4".split()))
    assert asked.accumulates and asked.stages == [1]
    with pytest.raises(ValueError, match="--pipeline-stages 9: the model has 2 layers"):
        stages.cut([{"a": (1,)}, {"b": (1,)}], 9)
    with pytest.raises(ValueError, match="no layers are found"):
        stages.layers({"weight": (3, 4)}, False)
