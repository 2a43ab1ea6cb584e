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
    _shorten_names(model.graph)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def shorten(path: Path) -> None:
    """Write a file again with short names."""
    import onnx

    model = onnx.load(str(path))
    _shorten_names(model.graph)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def _shorten_names(graph: Any) -> None:
    """Number the values between nodes, and name no node but the products, whose weights are found by them."""
    kept = {entry.name for entry in (*graph.input, *graph.output, *graph.initializer)}
    made = [name for node in graph.node for name in node.output if not {name, f"{name}.half"} & kept]
    short = {name: f"{number:x}" for number, name in enumerate(made)}
    del graph.value_info[:]
    for node in graph.node:
        node.input[:] = [short.get(name, name) for name in node.input]
        node.output[:] = [short.get(name, name) for name in node.output]
        node.ClearField("doc_string")
        if node.op_type != "MatMul":
            node.ClearField("name")


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
