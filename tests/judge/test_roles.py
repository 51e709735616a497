"""Roles derived from the parameter names of real models."""

from __future__ import annotations

import pytest

from surefoot.judge.incident import Incident, IncidentStep
from surefoot.judge.param_roles import ROLE_CAUSES, GradProblem, Role, cause_of_role, language_part, part_of, role_of
from surefoot.judge.rank_causes import rank_causes
from surefoot.records import Cause, Finding, FindingKind, StepMetrics

VISION, PROJECTION, LANGUAGE, OTHER = Role.VISION, Role.PROJECTION, Role.LANGUAGE, Role.OTHER
ATTENTION, NORM, EMBEDDING, HEAD = Role.ATTENTION, Role.NORM, Role.EMBEDDING, Role.HEAD
RECURRENT, CONVOLUTION = Role.RECURRENT, Role.CONVOLUTION

REAL = [
    # GPT-2, whose Conv1D is a linear layer
    ("transformer.wte.weight", "Embedding", EMBEDDING, LANGUAGE),
    ("transformer.wpe.weight", "Embedding", EMBEDDING, LANGUAGE),
    ("transformer.h.0.ln_1.weight", "LayerNorm", NORM, LANGUAGE),
    ("transformer.h.11.attn.c_attn.weight", "Conv1D", ATTENTION, LANGUAGE),
    ("transformer.h.11.attn.c_proj.bias", "Conv1D", ATTENTION, LANGUAGE),
    ("transformer.h.0.mlp.c_fc.weight", "Conv1D", LANGUAGE, LANGUAGE),
    ("transformer.ln_f.weight", "LayerNorm", NORM, LANGUAGE),
    ("lm_head.weight", "Linear", HEAD, LANGUAGE),
    # LLaMA, from Hugging Face and as it was first published
    ("model.embed_tokens.weight", "Embedding", EMBEDDING, LANGUAGE),
    ("model.layers.0.self_attn.o_proj.weight", "Linear", ATTENTION, LANGUAGE),
    ("model.layers.0.mlp.gate_proj.weight", "Linear", LANGUAGE, LANGUAGE),
    ("model.layers.0.post_attention_layernorm.weight", "LlamaRMSNorm", NORM, LANGUAGE),
    ("model.norm.weight", "LlamaRMSNorm", NORM, OTHER),
    ("tok_embeddings.weight", "Embedding", EMBEDDING, LANGUAGE),
    ("layers.0.attention.wq.weight", "Linear", ATTENTION, OTHER),
    ("layers.0.attention_norm.weight", "RMSNorm", NORM, OTHER),
    ("layers.0.feed_forward.w1.weight", "Linear", OTHER, OTHER),
    ("output.weight", "Linear", HEAD, OTHER),
    # GPT-NeoX, Qwen3, Mixtral, Mamba
    ("gpt_neox.layers.0.attention.query_key_value.weight", "Linear", ATTENTION, LANGUAGE),
    ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "Linear", LANGUAGE, LANGUAGE),
    ("embed_out.weight", "Linear", HEAD, OTHER),
    ("model.layers.0.self_attn.q_norm.weight", "Qwen3RMSNorm", NORM, LANGUAGE),
    ("model.layers.0.mlp.experts.gate_up_proj", "MixtralExperts", LANGUAGE, LANGUAGE),
    ("backbone.layers.0.mixer.conv1d.weight", "Conv1d", CONVOLUTION, OTHER),
    ("backbone.layers.0.mixer.A_log", "MambaMixer", OTHER, OTHER),
    # ViT: Hugging Face, timm and torchvision
    ("vit.embeddings.cls_token", "ViTEmbeddings", EMBEDDING, VISION),
    ("vit.embeddings.patch_embeddings.projection.weight", "Conv2d", EMBEDDING, VISION),
    ("vit.encoder.layer.0.attention.attention.query.weight", "Linear", ATTENTION, VISION),
    ("vit.encoder.layer.0.intermediate.dense.weight", "Linear", VISION, VISION),
    ("vit.encoder.layer.0.layernorm_before.weight", "LayerNorm", NORM, VISION),
    ("classifier.weight", "Linear", HEAD, OTHER),
    ("patch_embed.proj.weight", "Conv2d", EMBEDDING, VISION),
    ("pos_embed", "VisionTransformer", EMBEDDING, OTHER),
    ("blocks.0.attn.proj.weight", "Linear", ATTENTION, OTHER),
    ("blocks.0.mlp_tokens.fc1.weight", "Linear", OTHER, OTHER),
    ("conv_proj.weight", "Conv2d", EMBEDDING, VISION),
    ("encoder.layers.encoder_layer_0.self_attention.in_proj_weight", "MultiheadAttention", ATTENTION, OTHER),
    ("heads.head.weight", "Linear", HEAD, OTHER),
    # CLIP: Hugging Face, with its own spelling, and OpenAI's
    ("vision_model.embeddings.patch_embedding.weight", "Conv2d", EMBEDDING, VISION),
    ("vision_model.pre_layrnorm.weight", "LayerNorm", NORM, VISION),
    ("vision_model.encoder.layers.0.mlp.fc1.weight", "Linear", VISION, VISION),
    ("text_model.encoder.layers.0.self_attn.out_proj.weight", "Linear", ATTENTION, LANGUAGE),
    ("text_model.encoder.layers.0.mlp.fc2.bias", "Linear", LANGUAGE, LANGUAGE),
    ("visual_projection.weight", "Linear", PROJECTION, PROJECTION),
    ("text_projection.weight", "Linear", PROJECTION, PROJECTION),
    ("logit_scale", "CLIPModel", HEAD, OTHER),
    ("visual.proj", "VisionTransformer", PROJECTION, PROJECTION),
    ("visual.transformer.resblocks.0.attn.in_proj_weight", "MultiheadAttention", ATTENTION, VISION),
    # LLaVA, old and new
    ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", "Linear", ATTENTION, VISION),
    ("model.vision_tower.vision_model.encoder.layers.3.mlp.fc2.weight", "Linear", VISION, VISION),
    ("multi_modal_projector.linear_1.weight", "Linear", PROJECTION, PROJECTION),
    ("model.mm_projector.0.weight", "Linear", PROJECTION, PROJECTION),
    ("language_model.model.layers.0.mlp.down_proj.weight", "Linear", LANGUAGE, LANGUAGE),
    ("model.language_model.norm.weight", "LlamaRMSNorm", NORM, LANGUAGE),
    # BLIP-2
    ("query_tokens", "Blip2Model", EMBEDDING, OTHER),
    ("qformer.encoder.layer.0.crossattention.attention.query.weight", "Linear", ATTENTION, PROJECTION),
    ("qformer.encoder.layer.0.output_query.dense.weight", "Linear", PROJECTION, PROJECTION),
    ("language_projection.weight", "Linear", PROJECTION, PROJECTION),
    # ResNet: torchvision and Hugging Face
    ("conv1.weight", "Conv2d", CONVOLUTION, OTHER),
    ("backbone.layer1.0.bn1.weight", "BatchNorm2d", NORM, VISION),
    ("layer2.0.downsample.0.weight", "Conv2d", CONVOLUTION, VISION),
    ("layer2.0.downsample.1.weight", "BatchNorm2d", NORM, VISION),
    ("layer4.1.conv2.weight", "Conv2d", CONVOLUTION, VISION),
    ("fc.weight", "Linear", HEAD, OTHER),
    ("backbone.fc.bias", "Linear", HEAD, OTHER),
    ("resnet.encoder.stages.0.layers.0.layer.0.convolution.weight", "Conv2d", CONVOLUTION, VISION),
    ("resnet.embedder.embedder.normalization.weight", "BatchNorm2d", NORM, VISION),
    ("classifier.1.weight", "Linear", HEAD, OTHER),
    # T5
    ("shared.weight", "Embedding", EMBEDDING, OTHER),
    ("encoder.block.0.layer.0.SelfAttention.q.weight", "Linear", ATTENTION, LANGUAGE),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "Embedding", ATTENTION, LANGUAGE),
    ("decoder.block.0.layer.1.EncDecAttention.v.weight", "Linear", ATTENTION, LANGUAGE),
    ("decoder.block.0.layer.2.DenseReluDense.wi_0.weight", "Linear", LANGUAGE, LANGUAGE),
    ("decoder.final_layer_norm.weight", "T5LayerNorm", NORM, OTHER),
    # BERT
    ("bert.embeddings.word_embeddings.weight", "Embedding", EMBEDDING, LANGUAGE),
    ("bert.embeddings.LayerNorm.weight", "LayerNorm", NORM, LANGUAGE),
    ("bert.encoder.layer.0.attention.self.value.weight", "Linear", ATTENTION, LANGUAGE),
    ("bert.encoder.layer.0.attention.output.dense.weight", "Linear", ATTENTION, LANGUAGE),
    ("bert.encoder.layer.0.attention.output.LayerNorm.weight", "LayerNorm", NORM, LANGUAGE),
    ("bert.encoder.layer.0.output.dense.weight", "Linear", LANGUAGE, LANGUAGE),
    ("cls.predictions.transform.dense.weight", "Linear", HEAD, LANGUAGE),
    ("cls.predictions.bias", "BertLMPredictionHead", HEAD, LANGUAGE),
    # Whisper
    ("model.encoder.conv1.weight", "Conv1d", CONVOLUTION, OTHER),
    ("model.encoder.embed_positions.weight", "Embedding", EMBEDDING, OTHER),
    ("model.decoder.layers.0.encoder_attn.k_proj.weight", "Linear", ATTENTION, OTHER),
    ("model.decoder.layers.0.encoder_attn_layer_norm.weight", "LayerNorm", NORM, OTHER),
    ("proj_out.weight", "Linear", HEAD, OTHER),
    # Qwen-VL
    ("visual.patch_embed.proj.weight", "Conv3d", EMBEDDING, VISION),
    ("visual.blocks.0.attn.qkv.weight", "Linear", ATTENTION, VISION),
    ("visual.blocks.0.mlp.fc1.weight", "Linear", VISION, VISION),
    ("visual.merger.ln_q.weight", "LayerNorm", NORM, PROJECTION),
    ("visual.merger.mlp.0.weight", "Linear", PROJECTION, PROJECTION),
    ("model.visual.deepstack_merger_list.0.linear_fc1.weight", "Linear", PROJECTION, PROJECTION),
    ("model.language_model.layers.0.input_layernorm.weight", "Qwen2VLRMSNorm", NORM, LANGUAGE),
    # our own, and what people write themselves
    ("place", "Transformer", EMBEDDING, OTHER),
    ("blocks.0.attention.qkv.weight", "Linear", ATTENTION, OTHER),
    ("blocks.0.attention.out.weight", "Linear", ATTENTION, OTHER),
    ("head.bias", "Linear", HEAD, OTHER),
    ("projector.weight", "Linear", PROJECTION, PROJECTION),
    ("projection.weight", "Linear", PROJECTION, PROJECTION),
    ("vision.0.weight", "Conv2d", CONVOLUTION, VISION),
    ("vision.5.weight", "Linear", VISION, VISION),
    ("language.blocks.0.mlp.0.weight", "Linear", LANGUAGE, LANGUAGE),
    ("cell.weight_ih_l0", "LSTM", RECURRENT, OTHER),
    ("cell.bias_hh_l1_reverse", "GRU", RECURRENT, OTHER),
    ("norm.weight", "LayerNorm", NORM, OTHER),
    ("mlp.fc1.weight", "Linear", OTHER, OTHER),
    ("mlp.fc.weight", "Linear", OTHER, OTHER),
    ("layer1.weight", "Linear", OTHER, OTHER),
    ("0.weight", "Linear", OTHER, OTHER),
    ("", "", OTHER, OTHER),
]

SAID_BY_THE_CLASS = {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.weight", "shared.weight", "vision.0.weight"}
"""Names that do not say what the tensor is."""


@pytest.mark.parametrize(("name", "kind", "role", "part"), REAL)
def test_roles_of_real_parameter_names(name: str, kind: str, role: Role, part: Role) -> None:
    assert role_of(name, kind) is role
    assert part_of(name) is part
    if name not in SAID_BY_THE_CLASS:
        assert role_of(name) is role


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        ("LayerNorm", NORM),
        ("BatchNorm2d", NORM),
        ("SyncBatchNorm", NORM),
        ("LlamaRMSNorm", NORM),
        ("T5LayerNorm", NORM),
        ("Conv2d", CONVOLUTION),
        ("ConvTranspose1d", CONVOLUTION),
        ("MultiheadAttention", ATTENTION),
        ("Embedding", EMBEDDING),
        ("EmbeddingBag", EMBEDDING),
        ("LSTM", RECURRENT),
        ("GRUCell", RECURRENT),
        ("Linear", OTHER),
        ("Conv1D", OTHER),
        ("Normalize", OTHER),
    ],
)
def test_module_class_decides_where_the_name_does_not(kind: str, role: Role) -> None:
    assert role_of("net.3.weight", kind) is role


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "base_model.model.{}"])
@pytest.mark.parametrize(("name", "kind", "role", "part"), [row for row in REAL if "." in row[0]])
def test_wrapper_prefixes_are_ignored(wrapped: str, name: str, kind: str, role: Role, part: Role) -> None:
    assert role_of(wrapped.format(name), kind) is role
    if not name.startswith("layers."):  # `model.layers` is LLaMA's
        assert part_of(wrapped.format(name)) is part


def test_real_names_cover_every_part() -> None:
    assert {part_of(name) for name, *_ in REAL} == {VISION, PROJECTION, LANGUAGE, OTHER}


@pytest.mark.parametrize(
    ("role", "trouble", "cause", "expected_words"),
    [
        (VISION, GradProblem.EXPLODING, Cause.INPUT_SCALE, ("not normalised", "[-1, 1]", "[0, 1]", "black")),
        (PROJECTION, GradProblem.VANISHING, Cause.INITIALISATION, ("dimensions", "initialisation")),
        (LANGUAGE, GradProblem.OSCILLATING, Cause.ATTENTION_MASK, ("lengths vary", "padding", "mask")),
        (ATTENTION, GradProblem.NONFINITE, Cause.ATTENTION_MASK, ("mask", "too long")),
        (NORM, GradProblem.NONFINITE, Cause.ZERO_VARIANCE, ("zero variance",)),
        (HEAD, GradProblem.NONFINITE, Cause.LOG_OF_ZERO, ("log of zero", "divided by zero")),
    ],
)
def test_role_with_a_gradient_problem_suggests_a_cause(
    role: Role, trouble: GradProblem, cause: Cause, expected_words: tuple[str, ...]
) -> None:
    suggestion = cause_of_role(role, trouble)
    assert suggestion is not None
    assert suggestion[0] is cause
    assert all(words in suggestion[1] for words in expected_words)
    assert suggestion[1].endswith(".")


def test_other_roles_suggest_no_cause() -> None:
    silent = [(role, trouble) for role in Role for trouble in GradProblem if cause_of_role(role, trouble) is None]
    assert len(silent) == len(Role) * len(GradProblem) - len(ROLE_CAUSES)
    assert (NORM, GradProblem.EXPLODING) in silent


def test_tensor_counts_for_its_role_and_its_part() -> None:
    name = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
    nonfinite, exploding = (
        cause_of_role(role_of(name), GradProblem.NONFINITE),
        cause_of_role(part_of(name), GradProblem.EXPLODING),
    )
    assert nonfinite is not None
    assert exploding is not None
    assert (nonfinite[0], exploding[0]) == (Cause.ATTENTION_MASK, Cause.INPUT_SCALE)


VISION_LANGUAGE = (
    "vision.conv1.weight",
    "vision.conv2.weight",
    "projector.weight",
    "language.embed.weight",
    "language.head.weight",
)


def incident_of(detector: FindingKind, layers: list[str], **step: float) -> Incident:
    """An incident with one finding, and three steps in which the gradients of the language part lead so far."""
    row = StepMetrics(step=9, attempt=9, time=0.0)
    plain = {"z": 0.0, "log_norm_ratio": 0.0, "lr_ratio": 1.0, "loss_factor": 1.0, "front_layers_lead": 0.0}
    quiet = {"attention_lead": 0.0, "silent_fraction": 0.0, "input_novelty": 0.0}
    finding = Finding(
        step=9,
        attempt=9,
        detector=detector,
        detail="what was found",
        evidence={"layers": layers, "share": len(layers) / len(VISION_LANGUAGE), "norm": 1.0},
    )
    steps = [IncidentStep(row=row, **plain, **quiet, **step) for _ in range(3)]
    return Incident(onset=9, start_loss=2.0, normal_loss=1.0, steps=steps, findings=[finding])


@pytest.mark.parametrize(
    ("detector", "layers", "cause"),
    [
        (FindingKind.EXPLODING_GRADS, [*VISION_LANGUAGE[:2]], Cause.INPUT_SCALE),
        (FindingKind.VANISHING_GRADS, [VISION_LANGUAGE[2]], Cause.INITIALISATION),
    ],
)
def test_layers_of_one_part_of_the_model_suggest_a_cause(
    detector: FindingKind, layers: list[str], cause: Cause
) -> None:
    assert cause in [ranked[0] for ranked in rank_causes(incident_of(detector, layers))]
    for others in ([*layers, VISION_LANGUAGE[3]], list(VISION_LANGUAGE)):
        assert cause not in [ranked[0] for ranked in rank_causes(incident_of(detector, others))]


def test_swings_that_the_language_part_leads_suggest_its_mask() -> None:
    leads, others = (incident_of(FindingKind.OSCILLATION, [], language_lead=lead) for lead in (2.0, 0.1))
    reasons = {cause: reason for cause, _, reason in rank_causes(leads)}
    assert "language model oscillates" in reasons[Cause.ATTENTION_MASK]
    assert Cause.ATTENTION_MASK not in [ranked[0] for ranked in rank_causes(others)]
    assert language_part(VISION_LANGUAGE) == [3, 4]
    assert language_part(VISION_LANGUAGE[3:]) == [], "a model of language alone has no such part"
