"""By which rules a certificate is believed: the same with every Python.

Owns: these rules. Must not know: files, settings, or who connects.
"""

import ssl


def tls_context(
    purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, *, cafile: str | None = None, cadata: str | None = None
) -> ssl.SSLContext:
    """Return ``ssl.create_default_context``, without what Python 3.13 added to it.

    From 3.13 on it refuses authorities without a key usage, and certificates that do not name their authority's key.
    Private authorities often omit both. gRPC's clients and older versions take them, so a gateway must not depend on
    its Python.

    Raises:
        OSError, ValueError: the authorities cannot be read.
    """
    context = ssl.create_default_context(purpose, cafile=cafile, cadata=cadata)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
