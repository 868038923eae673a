"""A decoder's whole forward pass in C, compiled when the package is installed.

``decoder.c`` runs a step, ``products.c`` multiplies, ``attention.c`` attends, ``team.c`` has the threads, ``vectors.h``
the registers.
"""
