"""The demo: a small byte-level language model trained on real text through ``attention()``.

Not imported by ``csa_dispatch`` itself. ``corpus`` reads the standard library's sources, ``layers``
and ``model`` are the V4 layer kinds, ``train`` trains them, ``replay`` runs the trained layers'
tensors through every backend, ``mass`` splits attention into window, selected and sink, and
``console``, ``figures`` and ``report`` show it.
"""
