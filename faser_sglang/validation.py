"""Start-up checks, before any weight is loaded: one sentence for each thing that cannot work."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from faser_sglang import config, flags
from faser_sglang.algorithm import depth_cap
from faser_sglang.models import refuse_model

logger = logging.getLogger(__name__)

HEAD_KEYS = ("draft_vocab_size", "eagle_config")


def validate(server_args: Any) -> None:
    """SGLang's hook for a plugin's own checks; raises ValueError with the way out.

    Runs in the launching process only, before the arguments are resolved further: records what
    the draft checkpoint is and applies FASER's hooks there.
    """
    from faser_sglang import hooks

    settings = config.load()
    refuse_flags(server_args)
    settings.check_cap(depth_cap(server_args))
    check_files(server_args, settings)
    kind = check_draft(server_args, settings.drafter)
    check_window(server_args, kind)
    config.resolve_model_kind(kind)
    flags.warn(server_args)
    for sentence in without_effect(settings, depth_cap(server_args)):
        logger.warning("FASER: %s", sentence)
    hooks.install("launcher")


def check_draft(args: Any, drafter: str) -> str:
    """The kind of the draft checkpoint (see config.MODEL_KINDS), once it is known to fit."""
    path = args.speculative_draft_model_path
    if drafter == "ngram":
        if path:
            raise ValueError(
                "--faser-drafter ngram uses no draft model; leave out "
                "--speculative-draft-model-path, or take --faser-drafter hybrid."
            )
        refuse_model(
            "target",
            args.model_path,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
        )
        return "none"
    if not path:
        raise ValueError(
            "FASER needs --speculative-draft-model-path: an EAGLE or EAGLE3 head for the target, "
            "or a language model with its vocabulary; --faser-drafter ngram works without one."
        )
    kind = check_fit(
        args.model_path,
        path,
        context_length=args.context_length,
        tokenizer_path=args.tokenizer_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
        draft_revision=args.speculative_draft_model_revision,
    )
    is_head = kind in ("eagle", "eagle3")
    if (drafter == "lm" and is_head) or (drafter == "eagle" and not is_head):
        what = "an EAGLE head" if is_head else "a language model"
        raise ValueError(
            f"--faser-drafter {drafter} does not fit the draft {path}, which is {what}; "
            "leave the flag out, FASER sees the kind by itself."
        )
    return kind


def check_files(args: Any, settings: config.FaserConfig) -> None:
    """Refuse a cost table that cannot be used, and a trace that cannot be written."""
    if settings.cost_table is not None:
        from faser_sglang.control.cost import CostTable
        from faser_sglang.worker.origin import check_origin, launch_origin

        table = CostTable.load(settings.cost_table)
        check_origin(table.origin, launch_origin(args), settings.cost_table)
    if settings.trace is not None:
        reason = unwritable(Path(settings.trace))
        if reason:
            raise ValueError(
                f"--faser-trace {settings.trace} cannot be written: {reason}; name a file in a "
                "folder that exists and may be written to."
            )


def unwritable(file: Path) -> str | None:
    """Why ``file`` cannot be written, if so; nothing is left behind."""
    if file.is_dir():
        return "it is a folder"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return "this user may not"
    return None


def without_effect(settings: config.FaserConfig, cap: int) -> list[str]:
    """A sentence for each --faser-* flag that the others leave without effect."""
    is_off = settings.mode == "off" or cap == 0
    why_off = "with --faser-mode off" if settings.mode == "off" else "at --speculative-num-steps 0"
    depth = f"with --faser-depth {settings.depth}"
    fixed = settings.depth != "auto"
    measures = settings.depth != "random" and (not fixed or settings.stops or settings.trims)
    idle = []
    if settings.cost_table is not None and (is_off or not measures):
        idle.append(("--faser-cost-table", why_off if is_off else depth))
    if settings.token_limit is not None and (is_off or fixed):
        idle.append(("--faser-token-limit", why_off if is_off else depth))
    if is_off and fixed:
        idle.append(("--faser-depth", why_off))
    if settings.stop == "on" and (is_off or settings.drafter == "ngram"):
        idle.append(("--faser-stop", why_off if is_off else "with --faser-drafter ngram"))
    if settings.trim == "on" and is_off:
        idle.append(("--faser-trim", why_off))
    return [f"{flag} has no effect {why}." for flag, why in idle]


def check_window(args: Any, kind: str) -> None:
    """Refuse ``--speculative-draft-window-size`` where nothing would honour it.

    SGLang honours it for EAGLE3 heads, FASER's CPU platform for a language model.
    """
    if args.speculative_draft_window_size is None:
        return
    is_cpu = str(args.device or "").startswith("cpu")
    if kind == "eagle3" or (kind == "lm" and is_cpu):
        return
    what = {"lm": "a language model on a GPU", "none": "lookup, which has no draft KV"}
    raise ValueError(
        f"--speculative-draft-window-size is not served for {what.get(kind, 'EAGLE heads')}; "
        "leave it out."
    )


def refuse_flags(args: Any) -> None:
    """Raise ValueError for the first flag that FASER cannot serve (yet)."""
    steps = args.speculative_num_steps
    cap = depth_cap(args)
    if steps is not None and int(steps) < 0:
        raise ValueError(f"--speculative-num-steps is {steps}; it takes 0 or more.")
    width = args.speculative_num_draft_tokens
    if width is not None and int(width) != cap + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens {width} disagrees with --speculative-num-steps "
            f"{cap}; leave it out, FASER derives it."
        )
    flags.refuse(args)


def check_fit(
    target: str,
    draft: str,
    *,
    context_length: int | None = None,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    draft_revision: str | None = None,
) -> str:
    """Check that ``draft`` can draft for ``target``; raises ValueError with one sentence.

    Reads configurations, tokenizers and file headers only. A draft whose context is shorter than
    the target's is fine and said once: FASER does not draft beyond it.

    Returns:
        "lm", "eagle" or "eagle3".
    """
    from sglang.srt.configs.model_config import get_context_length
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    trust = {"trust_remote_code": trust_remote_code}
    refuse_model("target", target, revision=revision, **trust)
    target_config = get_config(target, revision=revision, **trust)
    draft_config = get_config(draft, revision=draft_revision, **trust)
    target_text, draft_text = get_hf_text_config(target_config), get_hf_text_config(draft_config)
    kind = checkpoint_kind(draft, draft_config)
    if kind == "lm":
        refuse_model("draft", draft, revision=draft_revision, **trust)
        _check_vocabulary(
            target, draft, target_text.vocab_size, draft_text.vocab_size, tokenizer_path
        )
    else:
        _check_head(target, draft, target_text, draft_text, kind)
    served = context_length or get_context_length(target_text)
    own = get_context_length(draft_text)
    if own < served and not _allows_longer_context():
        logger.warning(
            "FASER: the draft's context is %d tokens, the target's %d; beyond %d no token is "
            "drafted (depth 0).",
            own,
            served,
            own,
        )
    return kind


def _allows_longer_context() -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get())


def checkpoint_kind(draft: str, draft_config: Any) -> str:
    """What a draft checkpoint is, by its own config: "lm", "eagle" or "eagle3"."""
    names = [str(name) for name in getattr(draft_config, "architectures", None) or []]
    joined = " ".join(names).lower()
    if "nextn" in joined or "mtp" in joined:
        raise ValueError(
            f"FASER does not serve NEXTN or MTP heads yet, and {draft} is one ({names[0]}); give "
            "an EAGLE or EAGLE3 head or a language model as the draft."
        )
    if "eagle3" in joined:
        return "eagle3"
    if "eagle" in joined:
        return "eagle"
    if any(getattr(draft_config, key, None) for key in HEAD_KEYS):
        raise ValueError(
            f"the draft {draft} looks like an EAGLE3 head, but its config names "
            f"{names[0] if names else 'no architecture'}; set architectures to "
            '["LlamaForCausalLMEagle3"] in its config.json, as SGLang expects.'
        )
    return "lm"


def _check_head(target: str, draft: str, target_text: Any, head: Any, kind: str) -> None:
    """Widths, vocabularies and layers of an EAGLE head against the target's."""
    wanted = getattr(head, "target_hidden_size", None) or head.hidden_size
    if wanted != target_text.hidden_size:
        raise ValueError(
            f"the head {draft} is for a target of hidden size {wanted}, and {target} has "
            f"{target_text.hidden_size}; give the head that was trained for this target."
        )
    if head.vocab_size != target_text.vocab_size:
        raise ValueError(
            f"the head {draft} is for a vocabulary of {head.vocab_size} tokens, and {target} has "
            f"{target_text.vocab_size}; give the head that was trained for this target."
        )
    settings = getattr(head, "eagle_config", None) or {}
    if kind == "eagle3":
        layers = _check_layers(target, draft, settings, target_text.num_hidden_layers)
        _check_head_tensors(draft, head, len(layers), wanted)


def _check_layers(target: str, draft: str, settings: dict[str, Any], depth: int) -> list[int]:
    """The target's layers whose output the head reads: SGLang captures it before the next one."""
    layers = settings.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [1, depth // 2 - 1, depth - 4]  # SGLang's default, as inputs 2, N / 2 and N - 3
    unusable = [layer for layer in layers if not 0 <= layer < depth - 1]
    if unusable or not layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"the head {draft} reads the output of layers {layers} of a target, and {target} has "
            f"{depth} layers (each but the last can be read, once); give the head that was trained "
            "for this target, or name its layers as eagle_aux_hidden_state_layer_ids in the "
            "eagle_config of its config.json."
        )
    return layers


def _check_head_tensors(draft: str, head: Any, aux_layers: int, width: int) -> None:
    """Shapes that the config promises, off the headers of local safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(draft).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
    if not shapes:
        return  # not a local folder, or another format: SGLang's loader will tell
    reads = getattr(head, "num_aux_hidden_states", None) or aux_layers
    for key, shape in shapes.items():
        if key.endswith("fc.weight") and shape[1] != reads * width:
            raise ValueError(
                f"the head {draft} joins {shape[1]} hidden values, its config means {reads} layers "
                f"of {width}; its config.json and weights do not belong together."
            )
    reduced = getattr(head, "draft_vocab_size", None)
    if reduced and reduced != head.vocab_size and not any("d2t" in key for key in shapes):
        raise ValueError(
            f"the head {draft} has a vocabulary of its own ({reduced} tokens) and no map d2t to "
            "the target's; add the tensor d2t to its weights."
        )


def _check_vocabulary(
    target: str, draft: str, target_size: int, draft_size: int, tokenizer_path: str | None
) -> None:
    """Same tokens, same ids. Sizes may differ by padding rows if the tokenizers agree."""
    target_vocab = read_vocabulary(tokenizer_path or target)
    draft_vocab = read_vocabulary(draft)
    if target_vocab is not None and draft_vocab is not None:
        if target_vocab != draft_vocab:
            raise ValueError(
                f"the draft {draft} has another vocabulary than the target {target} (same text, "
                "other token ids); give a draft that shares the target's tokenizer."
            )
        if max(target_vocab.values()) < min(target_size, draft_size):
            return
    if target_size != draft_size:
        raise ValueError(
            f"the draft's vocabulary has {draft_size} tokens, the target's {target_size}; give a "
            "draft that shares the target's tokenizer."
        )


def read_vocabulary(path: str) -> dict[str, int] | None:
    """Token to id out of a local ``tokenizer.json``, added tokens included; None without one."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return {**vocabulary, **added}
