"""Drawings of caches: `picture` is what there is to draw, `describe` looks at a cache, `text` and `page` draw.

`numkv.show` prints a drawing; every cache has `_repr_html_`, which notebooks ask for.
"""
