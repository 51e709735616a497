"""Which old cases count as similar, how models are put into families, and the words for a similar case."""

from __future__ import annotations

import pytest
from incident_run import CASE, case

from surefoot.cases.model_family import family_of
from surefoot.cases.similarity import (
    NewIncident,
    as_event_field,
    most_similar,
    remedies_that_helped,
    similar_sentence,
)
from surefoot.trials.branches import CLIP, FLOAT32, LR_03, SKIP, BranchId, branch_of_remedy
from surefoot.trials.runner import in_order

NEW = NewIncident(causes=["learning_rate"], findings=CASE.findings, family="mlp", optimizer="AdamW", phase="early")


def test_the_most_similar_comes_first_and_others_do_not_come() -> None:
    twin = case(run="twin")
    other_optimizer = case(run="sgd", optimizer="SGD")
    other_model = case(run="vit", family="vision transformer", optimizer="LAMB", phase="late")
    other_cause = case(run="nan", cause="bad_batch", causes=("bad_batch",), findings=("nonfinite",))
    cases = [other_cause, other_model, other_optimizer, twin]
    assert [found.run for _, found in most_similar(cases, NEW)] == ["twin", "sgd", "vit"]
    assert not most_similar([other_cause], NEW)
    assert len(most_similar([case(run=str(i)) for i in range(9)], NEW)) == 3


def test_of_equals_the_one_in_which_something_helped_comes_first() -> None:
    similar = most_similar([case(run="a", helped=False, best="skip"), case(run="b", best="", remedies=("clip",))], NEW)
    assert [found.run for _, found in similar] == ["b", "a"]
    assert remedies_that_helped(similar) == ["clip"]
    assert remedies_that_helped([(9.0, case(helped=True, best="", remedies=(), actions=("refuse",)))]) == []


def test_words() -> None:
    (values,) = as_event_field([(9.0, CASE)])
    assert similar_sentence(values) == (
        "similar: old, step 150, learning rate in mlp/AdamW: clip helped (loss 0.5 before, 0.4 after)"
    )
    assert "did not help" in similar_sentence(values | {"helped": False})
    assert "not known" in similar_sentence(values | {"helped": None})
    assert similar_sentence({"run": [1], "step": None, "cause": "\x1b[2J"})


@pytest.mark.parametrize(
    ("names", "kinds", "family"),
    [
        (["0.weight", "2.weight"], ["Linear", "Linear"], "mlp"),
        (["wte.weight", "h.0.attn.c_attn.weight"], ["Embedding", "Conv1D"], "transformer"),
        (["conv1.weight", "fc.weight"], ["Conv2d", "Linear"], "convolutional"),
        (["patch_embed.proj.weight", "blocks.0.attn.qkv.weight"], ["Conv2d", "Linear"], "vision transformer"),
        (["vision.conv1.weight", "language_model.embed_tokens.weight"], ["Conv2d", "Embedding"], "vision-language"),
        (["rnn.weight_ih_l0"], ["LSTM"], "recurrent"),
        ([], [], "other"),
    ],
)
def test_families(names: list[str], kinds: list[str], family: str) -> None:
    assert family_of(names, kinds) == family


def test_the_branch_of_a_remedy_comes_first() -> None:
    assert branch_of_remedy("old_settings") is BranchId.OLD_SETTINGS
    assert branch_of_remedy("lower_lr") is BranchId.LR_03
    assert branch_of_remedy("refuse") is branch_of_remedy("rewind") is branch_of_remedy("") is None
    usual = [SKIP, CLIP, FLOAT32]
    assert in_order(usual, None) == usual
    assert in_order(usual, BranchId.FLOAT32) == [FLOAT32, SKIP, CLIP]
    assert in_order(usual, BranchId.LR_03) == [LR_03, *usual]
    assert in_order(usual, BranchId.OLD_SETTINGS) == usual  # nothing has changed that could be set back
