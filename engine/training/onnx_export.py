"""Export to ONNX with float16 weights: half the file, float32 arithmetic."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Axes = dict[str, dict[int, str]]


def export_fp16(model: nn.Module, example: tuple[Tensor, ...], path: Path, inputs: Axes, outputs: Axes) -> None:
    """Write ``model`` (on the CPU) to ``path``, opset 17; ``inputs``, ``outputs``: names and free axes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            example,
            str(path),
            opset_version=17,
            dynamo=False,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={name: axes for name, axes in {**inputs, **outputs}.items() if axes},
        )
    _halve_weights(path)


def _halve_weights(path: Path) -> None:
    """Store large float32 initialisers as float16, each cast back where the graph begins."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(str(path))
    casts: list[Any] = []
    for tensor in model.graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < 256:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{name}.half"))
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


@torch.no_grad()
def compare(model: nn.Module, path: Path, cases: list[tuple[Tensor, ...]]) -> float:
    """Share of output values that the ONNX file and the module agree on (to 1e-3) over ``cases``."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    agreed: list[Tensor] = []
    for case in cases:
        theirs = session.run(None, {name: value.numpy() for name, value in zip(names, case, strict=True)})[0]
        ours = model(*case)
        agreed.append(((torch.from_numpy(theirs) - ours).abs() < 1e-3).flatten().float())
    return float(torch.cat(agreed).mean())
