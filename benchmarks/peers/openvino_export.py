"""Write a Hugging Face checkpoint as OpenVINO's models, under OpenVINO's Python.

openvino_export.py MODEL OUTPUT GROUP

makes OUTPUT/float32, and of that OUTPUT/int8 (symmetric, a scale for each output) and OUTPUT/int4 (symmetric, a scale for
each GROUP inputs), with the embedding and the head in the same form. The exporter's own int4 fails, so nncf makes it.
"""

import shutil
import sys
from pathlib import Path

import nncf
import openvino
from optimum.exporters.openvino import main_export

MODEL = "openvino_model.xml"


def main() -> None:
    source, output, group = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    exact = output / "float32"
    main_export(source, exact, task="text-generation-with-past", load_in_8bit=False, convert_tokenizer=True)
    forms = {
        "int8": {"mode": nncf.CompressWeightsMode.INT8_SYM},
        "int4": {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": group, "all_layers": True},
    }
    for name, settings in forms.items():
        shutil.copytree(exact, output / name, ignore=shutil.ignore_patterns("openvino_model.*"))
        compressed = nncf.compress_weights(openvino.Core().read_model(exact / MODEL), **settings)
        openvino.save_model(compressed, output / name / MODEL, compress_to_fp16=False)


if __name__ == "__main__":
    main()
