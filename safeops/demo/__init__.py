"""The demo: one AMP training run on a real stereo pair, with the loss written the usual ways and with safeops.

`safeops demo` runs it. This file imports nothing: the package needs only torch, the demo needs `safeops[demo]`.
"""
