"""Is it the part, or its scale at the start? Norms, gates and 1/t, all with the output scale of softmax.

RMS norm is exactly √e times L2 norm; weights over 1/t grow with the scores. Here output projections are
scaled so that each attention starts with the same output scale as softmax (`equal_start`), and each variant
trains at its own learning rate. Where the output projection starts √e smaller, Adam, which moves each weight
by about the learning rate, changes it √e times as fast relative to its size. Four cells give that projection
a rate √e smaller (`output_lr`): RMS and Layer norm, and, as controls, L2 norm and softmax.
"""

import math

from paper_claims import MARGIN, MARGIN_REASON, which_norm_hardly_matters
from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, RATES

from maclaurin.study import Alike, Experiment, Study, cells_of

#: channels of a head at pico size
E = 32

study = Study(
    name="scale",
    title="Is it the part, or its scale at the start?",
    question=(
        "RMS norm differs from L2 norm only by a constant factor, and yet trains far worse. How much of the "
        "gaps between norms, gates and denominators comes from the scale of a layer's output at the start?"
    ),
    budget="about 20 minutes on 2 CPU cores with the search for learning rates",
    experiments=(
        Experiment(
            name="equal",
            title=f"{PICO_TEXT_TITLE}, equal start",
            metric="loss",
            common={**PICO_TEXT, "equal_start": True},
            cells=(
                *cells_of(
                    {
                        "softmax": "exp/sum",
                        "norm l2": "exp/l2",
                        "norm rms": "exp/rms",
                        "norm layer": "exp/layer",
                        "gate": "exp/len*out",
                        "1/t": "exp/len",
                        "order 1": "taylor(1)/l2",
                        "linear elu": "linear-elu",
                    }
                ),
                *cells_of(
                    {
                        "norm rms, output rate / √e": "exp/rms",
                        "norm layer, output rate / √e": "exp/layer",
                        "norm l2, output rate / √e": "exp/l2",
                        "softmax, output rate / √e": "exp/sum",
                    },
                    output_lr=1 / math.sqrt(E),
                ),
            ),
            seeds=(0, 1, 2, 3, 4),
            baseline="softmax",
            tune=RATES,
        ),
    ),
    claims=(
        which_norm_hardly_matters("equal", "norm l2", "norm rms", "norm layer"),
        Alike(
            says="L2 and RMS differ in the scale of their rows and in nothing else.",
            note="RMS(y) = √e L2(y)",
            experiment="equal",
            cells=("norm l2", "norm rms"),
            within=MARGIN,
            because=MARGIN_REASON,
        ),
        Alike(
            says="With a rate √e smaller for its output projection, RMS is as good as L2.",
            note="what Adam's step does to a projection that is √e smaller",
            experiment="equal",
            cells=("norm l2", "norm rms, output rate / √e"),
            within=MARGIN,
            because=MARGIN_REASON,
        ),
    ),
)
