"""One worker of a BytePS job under TensorFlow: as ``rank``, which imports the plugin for MXNet."""

from __future__ import annotations

import byteps.tensorflow as bps

from tests.frameworks.byteps.rank import call

if __name__ == "__main__":
    bps.init()
    call(bps.rank())
