"""From files to weights: mapped where that will do, codes as codes where the plan holds them so, else decoded in parts.

load.py    the only place that reads weights
decode.py  coded tensors -> float32
stored/    one file per published format, or family of formats
"""
