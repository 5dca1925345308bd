"""A Hugging Face folder -> GGUF, without torch and without a copy of llama.cpp.

llama, mistral, qwen2, qwen3, gemma3 (its text model) and phi3. What the folder holds and GGUF cannot say is refused,
never dropped in silence. Tensors and metadata follow llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quantlab.core.errors import QuantlabError, missing_extra
from quantlab.core.files import check_space, os_error
from quantlab.core.progress import Progress, silent
from quantlab.quantize.spec import OutType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from quantlab.quantize.convert.architectures import Model, Part
    from quantlab.quantize.convert.vocabulary import Vocabulary
    from quantlab.quantize.convert.weights import Checkpoint

# What gguf has to say of odd model cards is not for the user; the library prints nothing.
for _name in ("gguf", "metadata"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def convert(
    folder: Path,
    out: Path,
    *,
    outtype: OutType,
    extra_metadata: Mapping[str, str] | None = None,
    header_only: bool = False,
    progress: Progress = silent,
) -> None:
    """Write the model of `folder` as one GGUF at `out`, a temporary path that the caller renames.

    Vectors, norms among them, become F32, matrices `outtype`. `extra_metadata` wins over what the folder says. With
    `header_only` a hole stands for the weights: it takes no room on the disk, and serves to plan.
    Raises QuantlabError for a folder that lacks something, is damaged, holds weights that are not finite or do not
    fit `outtype`, or cannot be converted exactly.
    """
    try:
        from quantlab.quantize.convert.architectures import factor_tensors, read_model
        from quantlab.quantize.convert.vocabulary import read_vocabulary
        from quantlab.quantize.convert.weights import Checkpoint
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "numpy", "gguf") from error
    model = read_model(folder)
    with Checkpoint(folder) as checkpoint:
        plan, factors = _plan(model, checkpoint), factor_tensors(model)
        vocabulary = read_vocabulary(folder, model.count("vocab_size"), arch=model.family.arch)
        writer = _tensor_table(model, plan, factors, outtype)
        _write_metadata(writer, model, vocabulary, folder, outtype)
        for key, value in (extra_metadata or {}).items():
            writer.kv_data[0].pop(key, None)
            writer.add_string(key, value)
        padded = sum(writer.ggml_pad(info.nbytes, writer.data_alignment) for info in writer.tensors[0].values())
        check_space(out.parent, 0 if header_only else padded)
        try:
            _write_header(writer, folder, out)
            with out.open("ab") as file:
                _pad(file, writer.data_alignment)
                if header_only:
                    file.truncate(file.tell() + padded)
                    return
                blocks = _blocks(checkpoint, plan, factors, outtype)
                _write_weights(file, blocks, writer.data_alignment, sum(part.params for _, part in plan), progress)
        except OSError as error:
            # `out` has a passing name.
            raise os_error(error, out.parent) from error


def _plan(model: Model, checkpoint: Checkpoint) -> list[tuple[str, Part]]:
    """The folder's name and the place of every tensor that is written, in the order of the model."""
    from quantlab.quantize.convert.architectures import canonical_name, list_names, parts

    shapes = checkpoint.shapes()
    wanted = parts(model, len(shapes))
    found: dict[str, str] = {}
    unplaced = []
    for name in shapes:
        canonical = canonical_name(model, name)
        if canonical in found or (canonical is not None and canonical not in wanted):
            unplaced.append(name)
        elif canonical is not None:
            found[canonical] = name
    if unplaced:
        raise QuantlabError(
            f"tensors without a place in {model.family.arch}: {list_names(unplaced)}",
            "config.json names another architecture, or the model has parts that cannot be converted here",
        )
    if missing := [name for name in wanted if name not in found and name != _HEAD]:
        raise QuantlabError(f"tensors are missing: {list_names(missing)}", "download the folder again")
    for canonical, name in found.items():
        if (shape := wanted[canonical].shape) != shapes[name]:
            raise QuantlabError(
                f"`{name}` has the shape {list(shapes[name])}, config.json says {list(shape)}",
                "config.json belongs to another model",
            )
    if not _has_own_head(model, checkpoint, found):
        del wanted[_HEAD]
    return [(found[canonical], part) for canonical, part in wanted.items()]


def _has_own_head(model: Model, checkpoint: Checkpoint, found: dict[str, str]) -> bool:
    """Whether the output layer is a matrix of its own; llama.cpp uses the embedding where the GGUF holds none."""
    tied = model.config.get("tie_word_embeddings")
    if _HEAD not in found:
        if tied is False:
            raise QuantlabError(f"tensors are missing: `{_HEAD}`", "download the folder again")
        return False
    if checkpoint.same(found[_HEAD], found[_EMBEDDING]):
        return False
    if tied:
        raise QuantlabError(
            f"config.json says tie_word_embeddings, and `{found[_HEAD]}` differs from `{found[_EMBEDDING]}`",
            "set `tie_word_embeddings` to false if the head was trained, or remove the head",
        )
    return True


def _tensor_table(
    model: Model, plan: list[tuple[str, Part]], factors: dict[str, npt.NDArray[np.float32]], outtype: OutType
) -> Any:
    """A GGUFWriter that knows every tensor and no data."""
    import gguf

    from quantlab.quantize.convert.weights import stored_type

    writer = gguf.GGUFWriter(path=None, arch=model.family.arch)
    for name, values in factors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for _, part in plan:
        stored = stored_type(part, outtype)
        kind = gguf.GGMLQuantizationType[stored.name]
        writer.add_tensor_info(part.gguf, part.shape, stored.bits, part.params * stored.bits.itemsize, kind)
    return writer


def _write_metadata(writer: Any, model: Model, vocabulary: Vocabulary, folder: Path, outtype: OutType) -> None:
    import gguf

    from quantlab.quantize.convert.architectures import write_parameters
    from quantlab.quantize.convert.vocabulary import write_vocabulary

    total, shared, expert, experts = writer.get_total_parameter_count()
    try:
        # Name, licence and sampling defaults of README.md and generation_config.json.
        metadata = gguf.Metadata.load(None, folder, None, total)
    except Exception:  # a model card of any form: what it says is credit, not part of the model
        metadata = gguf.Metadata(name=folder.name)
    # What gguf takes for a fine-tune where a folder's name has no parts, such as a commit.
    if metadata.finetune == folder.name:
        metadata.finetune = None
    if metadata.size_label is None:
        metadata.size_label = gguf.size_label(total, shared, expert, experts)
    writer.add_type(gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)
    file_type = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}[outtype]
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_parameters(writer, model)
    write_vocabulary(writer, vocabulary, folder)


def _write_header(writer: Any, folder: Path, out: Path) -> None:
    try:
        writer.write_header_to_file(path=out)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    except (TypeError, ValueError, AttributeError, struct.error) as error:
        raise QuantlabError(
            f"a setting of `{folder}` cannot be stored: {error!r}",
            "check config.json, generation_config.json and the head of README.md",
        ) from error
    finally:
        writer.close()


def _blocks(
    checkpoint: Checkpoint, plan: list[tuple[str, Part]], factors: dict[str, npt.NDArray[np.float32]], outtype: OutType
) -> Iterator[Iterable[npt.NDArray[Any]]]:
    """The data of each tensor in the order of the header, in pieces."""
    from quantlab.quantize.convert.weights import stored_type

    for values in factors.values():
        yield [values]
    for name, part in plan:
        yield checkpoint.convert(name, part, stored_type(part, outtype))


def _write_weights(
    file: BinaryIO, tensors: Iterable[Iterable[npt.NDArray[Any]]], alignment: int, total: int, progress: Progress
) -> None:
    """Append the data of all tensors, each padded to a multiple of `alignment`; `total` counts weights."""
    done = 0
    for blocks in tensors:
        for block in blocks:
            file.write(block.data)
            done += block.size
            progress("converting", min(done, total), total)
        _pad(file, alignment)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))
