"""Folders of sentence-transformers: modules in sequence, the first a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.porting import folder as folders
from concord.porting.containers.container import inside
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, refuse
from concord.spec.files import parse_json, read_as, read_json
from concord.spec.text import shown

MODULES = "modules.json"

# Keys for settings of the modules after the model: how tokens are pooled, and whether the vector is
# normalised.
POOLING, NORMALIZE = "pooling_mode", "normalize"

CHAINS = (("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize"))  # that the family can express

# A flag for each pooling, older than pooling_mode. All versions read flags, so these are written.
OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

WRITTEN = 4  # of these flags; older versions do not support the others

# The unused pooler of such models, and the key of the model's arguments in LENGTHS.
POOLER, ARGUMENTS = "pooler.*", "model_args"

LONGEST = 400  # maximum characters shown of a list of modules

NOT_REFUSED = (
    "to read only the encoder, use --from hugging-face, hugging-face-roberta or hugging-face-distilbert, "
    "whichever matches the model"
)


@dataclass(frozen=True)
class Module:
    """An entry of ``modules.json``: a class, and its folder."""

    type: str
    path: str


def places(folder: Path) -> list[Path]:
    """Return the modules' folders, the model's first; refuse unsupported modules."""
    where = folder / MODULES
    modules = read_as(where, list[Module])
    # A module of another package may have one of these names, and compute something else.
    kinds = tuple(
        kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind
        for kind in (module.type for module in modules)
    )
    if kinds not in CHAINS:
        raise SpecError(
            f"{where} lists {shown(', '.join(kinds), LONGEST) or 'no modules'} but must list "
            f"{' or '.join(', '.join(chain) for chain in CHAINS)}; {NOT_REFUSED}"
        )
    paths = [inside(folder, module.path, str(where)) for module in modules]
    for place in paths[1:]:
        inside(folder, str((place / folders.CONFIG).relative_to(folder)), str(where))
    if not paths[0].is_dir():
        raise SpecError(f"{where} names {modules[0].path[:80]!r} but there is no such folder in {folder}")
    return paths


def words(folder: Path, poolings: Iterable[str]) -> dict[str, Any]:
    """Settings of modules after the model; ``poolings`` are those of the family."""
    _, *behind = places(folder)
    problems, where = list[str](), behind[0] / folders.CONFIG
    settings = folders.json_object(read_json(where), where)
    modes = _modes(settings)
    if len(modes) != 1 or modes[0] not in list(poolings):
        problems.append(
            f"{where} pools by {' and '.join(_brief(mode) for mode in modes)} but Concord's model family "
            f"pools only by one of {', '.join(poolings)}; {NOT_REFUSED}"
        )
    if settings.get("include_prompt", True) is not True:
        problems.append(
            f"{where}: 'include_prompt' is {_brief(settings['include_prompt'])} but must be true: "
            f"Concord's model family pools every token; {NOT_REFUSED}"
        )
    for place in behind[1:]:
        # A Normalize module that reads or writes anything else would leave the pooled vector unchanged.
        path = place / folders.CONFIG
        options = folders.json_object(read_json(path), path) if path.exists() else {}
        problems += [
            f'{path}: {key!r} is {_brief(options[key])} but must be "sentence_embedding"'
            for key in ("module_input_name", "module_output_name")
            if options.get(key, "sentence_embedding") != "sentence_embedding"
        ]
    refuse(problems)
    return {POOLING: modes[0], NORMALIZE: len(behind) > 1}


def files(
    said: Mapping[str, Any], config: EncoderConfig, carried: bytes | None, bare: bool
) -> dict[str, bytes]:
    """Files of a sentence-transformers folder, by name.

    Args:
        said: pooling and normalisation, in a table's terms.
        bare: whether the weights lack the usual pooler.
    """
    kinds = CHAINS[said[NORMALIZE] == "true"]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    pooling = {
        "word_embedding_dimension": config.d_model,
        **{key: mode == said[POOLING] for key, mode in list(OLDER.items())[:WRITTEN]},
    }
    lengths = (
        {"max_seq_length": config.max_tokens, "do_lower_case": False}
        if carried is None
        else parse_json(carried, folders.LENGTHS)
    )
    if bare and isinstance(lengths, dict):
        # Otherwise the library adds a random pooler, with a warning.
        arguments = lengths.get(ARGUMENTS)
        lengths[ARGUMENTS] = {
            **(arguments if isinstance(arguments, dict) else {}),
            "add_pooling_layer": False,
        }
    return {
        MODULES: folders.json_file(modules),
        f"{paths[1]}/{folders.CONFIG}": folders.json_file(pooling),
        folders.LENGTHS: folders.json_file(lengths),
    }


def _modes(settings: Mapping[str, Any]) -> list[Any]:
    if POOLING in settings:
        return settings[POOLING] if isinstance(settings[POOLING], list) else [settings[POOLING]]
    # Several flags concatenate the poolings; without a flag, the library uses the mean.
    return [mode for key, mode in OLDER.items() if settings.get(key)] or ["mean"]


def _brief(value: Any) -> str:
    return json.dumps(value)[:60]
