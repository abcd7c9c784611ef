"""What a matplotlib figure shows, as data: the JSON that E2B's clients know as `chart`.

One kind for each Axes: line, scatter, bar, pie, box_and_whisker, or unknown; a figure with several is a superchart.
Labels, units and ticks come from the axes, the numbers from the artists, not from the picture.

Absent on purpose: guessing. Axes that hold anything but one known kind of artist are `unknown`, without elements.
"""

import datetime
import re

import numpy
from matplotlib import dates
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.patches import PathPatch, Rectangle, Wedge

POINTS_MAX = 200_000
UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


def chart(figure):
    """The figure's chart, or None if it shows nothing or more than a client could want as numbers."""
    axes = figure.get_axes()
    if not any(ax.has_data() for ax in axes) or _points(axes) > POINTS_MAX:
        return None
    if len(axes) == 1:
        return _axes_chart(axes[0])
    return {"type": "superchart", "title": figure.get_suptitle() or None, "elements": [_axes_chart(ax) for ax in axes]}


def _points(axes):
    lines = sum(len(line.get_xdata()) for ax in axes for line in ax.lines)
    return lines + sum(len(collection.get_offsets()) for ax in axes for collection in ax.collections)


def _axes_chart(ax):
    kind = _kind(ax)
    made = {"type": kind, "title": ax.get_title() or None, "elements": []}
    made.update({"line": _line, "scatter": _scatter, "bar": _bar, "pie": _pie, "box_and_whisker": _box}.get(kind, _nothing)(ax))
    return made


def _kind(ax):
    lines, patches, collections = list(ax.lines), list(ax.patches), list(ax.collections)
    if ax.images or ax.tables or ax.artists:
        return "unknown"
    if not patches and not collections:
        return "line"
    if not collections and all(isinstance(patch, PathPatch) for patch in patches):
        return "box_and_whisker"
    if not all(_is_ruler(line) for line in lines):
        return "unknown"
    if not patches and all(isinstance(collection, PathCollection) for collection in collections):
        return "scatter"
    if not collections and all(isinstance(patch, Wedge) for patch in patches):
        return "pie"
    if not collections and all(isinstance(patch, Rectangle) for patch in patches):
        return "bar"
    return "unknown"


def _is_ruler(line):
    """A straight line along an axis, such as axhline draws: help for the eye, not data."""
    x, y = line.get_xdata(), line.get_ydata()
    return len(x) == 2 and len(y) == 2 and (x[0] == x[1] or y[0] == y[1])


def _nothing(_):
    return {}


def _labels(ax, swapped=False):
    x, y = ax.get_xlabel() or None, ax.get_ylabel() or None
    if swapped:
        x, y = y, x
    return {"x_label": x, "y_label": y, "x_unit": _unit(x), "y_unit": _unit(y)}


def _unit(label):
    found = UNIT.search(label or "")
    return (found.group(1) or found.group(2)) if found else None


def _line(ax):
    elements = []
    for line in ax.lines:
        if _is_ruler(line):
            continue
        label = line.get_label()
        if label.startswith("_child"):
            label = f"Line {label[6:]}"
        pairs = zip(line.get_xdata(), line.get_ydata())
        elements.append({"label": label, "points": [[_value(x), _value(y)] for x, y in pairs]})
    return {**_labels(ax), **_scales(ax), "elements": elements}


def _scatter(ax):
    x_value, y_value = _reader(ax.xaxis), _reader(ax.yaxis)
    elements = []
    for collection in ax.collections:
        points = [[x_value(x), y_value(y)] for x, y in collection.get_offsets().tolist()]
        elements.append({"label": collection.get_label(), "points": points})
    return {**_labels(ax), **_scales(ax), "elements": elements}


def _scales(ax):
    made = {}
    for name, axis, scale in (("x", ax.xaxis, ax.get_xscale()), ("y", ax.yaxis, ax.get_yscale())):
        texts = [label.get_text() for label in axis.get_ticklabels()]
        ticks = [float(tick) for tick in axis.get_ticklocs()]
        if _is_dates(axis):
            made[f"{name}_ticks"], scale = [_date(tick) for tick in ticks], "datetime"
        else:
            made[f"{name}_ticks"] = ticks
            if scale == "linear" and _is_categorical(ticks, texts):
                scale = "categorical"
        made[f"{name}_tick_labels"] = texts
        made[f"{name}_scale"] = scale
    return made


def _is_categorical(ticks, texts):
    """Ticks 0, 1, 2, … with labels that are not these numbers."""
    return bool(ticks) and all(tick == i and text != str(i) for i, (tick, text) in enumerate(zip(ticks, texts)))


def _converter(axis):
    # `converter` became `get_converter()` in matplotlib 3.10.
    return axis.get_converter() if hasattr(axis, "get_converter") else axis.converter


def _is_dates(axis):
    return isinstance(_converter(axis), (dates.DateConverter, dates._SwitchableDateConverter))


def _date(number):
    return dates.num2date(number).isoformat()


def _reader(axis):
    return _date if _is_dates(axis) else float


def _value(value):
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, numpy.datetime64):
        return str(value.astype("datetime64[s]"))
    return value if isinstance(value, str) else float(value)


def _bar(ax):
    elements, swapped = [], False
    for number, container in enumerate(c for c in ax.containers if isinstance(c, BarContainer)):
        group = container.get_label()
        if group.startswith("_container"):
            group = f"Group {number}"
        lying = container.orientation == "horizontal"
        swapped = swapped or lying
        names = _names(ax.yaxis if lying else ax.xaxis)
        for bar in container.patches:
            middle = bar.get_y() + bar.get_height() / 2 if lying else bar.get_x() + bar.get_width() / 2
            value = bar.get_width() if lying else bar.get_height()
            elements.append({"label": names(middle), "group": group, "value": float(value)})
    return {**_labels(ax, swapped), "elements": elements}


def _names(axis):
    """A function from a place on the axis to what is written there."""
    texts = zip(axis.get_ticklocs(), (label.get_text() for label in axis.get_ticklabels()))
    written = {round(float(tick), 9): text for tick, text in texts if text}
    wide = _converter(axis) is not None and not _is_dates(axis)

    def name(place):
        if wide and written:
            # Groups of bars stand beside their category, not on it.
            near = min(written, key=lambda tick: abs(tick - place))
            if abs(near - place) < 0.5:
                return written[near]
        return written.get(round(float(place), 9)) or f"{float(place):g}"

    return name


def _pie(ax):
    wedges = [
        {"label": wedge.get_label(), "angle": round(abs(float(wedge.theta2) - float(wedge.theta1)), 4), "radius": float(wedge.r)}
        for wedge in ax.patches
    ]
    return {"elements": wedges}


def _box(ax):
    lines = [(numpy.asarray(line.get_xdata(), float), numpy.asarray(line.get_ydata(), float)) for line in ax.lines]
    boxes = [patch.get_path().get_extents().extents for patch in ax.patches]
    lying = bool(boxes) and not any(_median(box, lines) is not None for box in boxes)
    if lying:
        lines = [(y, x) for x, y in lines]
        boxes = [(y0, x0, y1, x1) for x0, y0, x1, y1 in boxes]
    names = _names(ax.yaxis if lying else ax.xaxis)
    return {**_labels(ax, lying), "elements": [_box_element(box, lines, names) for box in boxes]}


def _median(box, lines):
    """Where the line lies that crosses an upright box from side to side."""
    left, low, right, high = box
    for x, y in lines:
        if len(x) == 2 and y[0] == y[1] and low <= y[0] <= high and numpy.allclose(sorted(x), (left, right)):
            return float(y[0])
    return None


def _box_element(box, lines, names):
    left, low, right, high = (float(side) for side in box)
    middle = (left + right) / 2
    bottom, top, outliers = low, high, []
    for x, y in lines:
        if len(x) == 0 or not numpy.allclose(x, middle):
            continue
        if len(x) == 2 and numpy.isclose(max(y), low):
            bottom = float(min(y))
        elif len(x) == 2 and numpy.isclose(min(y), high):
            top = float(max(y))
        else:
            outliers.extend(float(value) for value in y)
    median = _median(box, lines)
    return {
        "label": names(middle),
        "min": bottom,
        "first_quartile": low,
        "median": low if median is None else median,
        "third_quartile": high,
        "max": top,
        "outliers": outliers,
    }
