"""Values and figures in the words of TensorBoard's plugins."""

import contextlib
import io
import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE
from tensorboard.plugins.histogram.plugin_data_pb2 import HistogramPluginData
from tensorboard.plugins.hparams.api_pb2 import STATUS_RUNNING, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.pr_curve.plugin_data_pb2 import PrCurvePluginData

from isoscale.observe.figures import Detection, Drawable, Histogram, Network, PrecisionRecall

NUM_THRESHOLDS = 201
"""The plugin takes them as spread evenly over 0 … 1."""
NO_HYPER_PARAMETERS = ("checkpoint.", "launch.", "observe.")
"""Sections of a recipe that say where a run happens, how it is kept and who watches, and do not change its result."""


def scalars(values: Mapping[str, float]) -> Summary:
    """One value for each tag."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def figure(tag: str, shown: Drawable) -> Summary:
    """What the plugin for that kind of figure takes: a distribution, curves, or else a picture of it."""
    if isinstance(shown, Histogram):
        return Summary(value=[_histogram(tag, shown)])
    values = [_picture(tag, shown)]
    if isinstance(shown, PrecisionRecall):
        values += [_curve(f"{tag}/{name}", found) for name, found in shown.classes.items() if _is_probability(found)]
    return Summary(value=values)


def _picture(tag: str, shown: Drawable) -> Summary.Value:
    from isoscale.observe.drawing import draw
    from isoscale.observe.style import png

    file = png(draw(tag, shown))
    width, height = (int.from_bytes(file[place : place + 4], "big") for place in (16, 20))  # the header of every PNG
    image = Summary.Image(encoded_image_string=file, width=width, height=height, colorspace=4)
    return Summary.Value(tag=tag, image=image)


def _histogram(tag: str, shown: Histogram) -> Summary.Value:
    bins = np.stack([shown.edges[:-1], shown.edges[1:], shown.counts], axis=1)
    return _tensor(tag, bins, _metadata("histograms", HistogramPluginData()))


def _is_probability(found: Detection) -> bool:
    """Whether the plugin's thresholds mean something to these scores."""
    scores = found.thresholds
    return len(scores) == 0 or bool(scores[0] <= 1 and scores[-1] >= 0)


def _curve(tag: str, found: Detection) -> Summary.Value:
    """The counts at each of the plugin's thresholds: those of the smallest score that reaches it."""
    wanted = np.linspace(0, 1, NUM_THRESHOLDS)
    places = np.searchsorted(-found.thresholds, -wanted, side="right")
    true_positives = np.concatenate([[0], found.true_positives])[places]
    false_positives = np.concatenate([[0], found.false_positives])[places]
    at = Detection(wanted, true_positives, false_positives, found.num_positives, found.num_negatives)
    true_negatives, false_negatives = at.num_negatives - false_positives, at.num_positives - true_positives
    rows = (true_positives, false_positives, true_negatives, false_negatives, at.precision, at.recall)
    return _tensor(tag, np.stack(rows), _metadata("pr_curves", PrCurvePluginData(num_thresholds=NUM_THRESHOLDS)))


def _tensor(tag: str, values: NDArray[Any], metadata: SummaryMetadata) -> Summary.Value:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in values.shape])
    content = np.ascontiguousarray(values, "<f8").tobytes()
    tensor = TensorProto(dtype=DT_DOUBLE, tensor_shape=shape, tensor_content=content)
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _metadata(plugin: str, content: Any) -> SummaryMetadata:
    data = SummaryMetadata.PluginData(plugin_name=plugin, content=content.SerializeToString())
    return SummaryMetadata(plugin_data=data)


def settings(values: Mapping[str, Any]) -> Summary:
    """The hyper-parameters of a run that begins; what is not set is left out, so that columns of numbers stay so."""
    info = SessionStartInfo(start_time_secs=time.time())
    for key, value in values.items():
        match value:
            case _ if value is None or key.startswith(NO_HYPER_PARAMETERS):
                continue
            case bool():
                info.hparams[key].bool_value = value
            case int() | float() if math.isfinite(value):
                info.hparams[key].number_value = value
            case _:
                info.hparams[key].string_value = value if isinstance(value, str) else json.dumps(value, default=str)
    return _session("session_start_info", HParamsPluginData(session_start_info=info))


def ended(status: Literal["done", "stopped", "failed"]) -> Summary:
    """How a run ended; one that stopped on request goes on later."""
    reached = STATUS_SUCCESS if status == "done" else STATUS_RUNNING
    info = SessionEndInfo(status=reached, end_time_secs=time.time())
    return _session("session_end_info", HParamsPluginData(session_end_info=info))


def _session(name: str, content: HParamsPluginData) -> Summary:
    return Summary(value=[Summary.Value(tag=f"_hparams_/{name}", metadata=_metadata("hparams", content))])


def graph(network: Network) -> bytes:
    """The operations of a network and how they hang together; raises whatever tracing it raises."""
    from torch import no_grad
    from torch.utils.tensorboard._pytorch_graph import graph as trace

    # On failure the function prints, and tracing warns of every size that a network looks at.
    quiet = contextlib.redirect_stdout(io.StringIO())
    with _modes_kept(network.module), quiet, warnings.catch_warnings(), no_grad():
        warnings.simplefilter("ignore")
        return bytes(trace(network.module, network.example)[0].SerializeToString())


@contextlib.contextmanager
def _modes_kept(module: Any) -> Iterator[None]:
    """Each layer stays in its own mode: torch's function sets them all to that of the outermost."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training
