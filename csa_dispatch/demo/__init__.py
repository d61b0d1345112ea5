"""The demo: a small byte-level language model trained on real text through ``attention()``.

Not imported by ``csa_dispatch`` itself. ``run`` is the whole of it: ``corpus`` reads the standard
library's sources, ``layers`` and ``model`` are the V4 layer kinds, ``train`` trains them,
``capture`` keeps the trained layers' tensors, ``replay`` runs those through every backend,
``mass`` splits attention into window, selected and sink; ``console``, ``figures`` and ``report``
show the ``results``.
"""
