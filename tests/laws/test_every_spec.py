"""Every law for every distinct spec of the catalogue, and for compositions nobody has published."""

from maclaurin import catalogue
from maclaurin.testing import SpecLaws

PUBLISHED = list(dict.fromkeys(str(entry.spec) for entry in catalogue))

OWN = [
    "exp*in*forget/len*out",
    "exp/rms(heads)",
    "exp/sum(floor=0.5)",
    "taylor(2,about=mean)/sum",
    "taylor(4,about=mean)/sum",
    "taylor(3,about=mean)/l2",
    "taylor(1,about=mean)/sum",
    "taylor(2,about=mean)*in*forget/sum*out",
    "hermite(1)/len",
    "hermite(2)/len",
    "hermite(3)/len",
    "hermite(3)*forget/sum",
    "taylor(2)/len*out",
    "taylor(3)/layer",
    "power(3)*forget/rms*out",
    "power(1)/l2",
    "poly(1,1,0.5)/sum",
    "poly(0.5,0,0,1)*in/l2(scale=2)",
    "linear(identity)",
    "linear(elu1)*in*forget/sum*out/layer",
    "linear(relu)*forget/running(floor=1)",
    "taylor(2)*forget/running(len)",
    "sigmoid(-1)*forget/sum",
    "taylor(2)+window(3)/sum",
    "taylor(0,about=mean)+window(3)/sum",
    "taylor(2,about=mean)+window(4,sinks=1)/sum",
    "taylor(1,about=mean)+window(2,sinks=2)/sum",
    "taylor(2,about=mean)+window(3,sinks=1)*in*forget/sum*out",
    "taylor(3,about=mean)+window(3)/l2",
    "taylor(2)+window(2,sinks=1)/len",
    "hermite(2)+window(3,sinks=1)*forget/sum",
    "poly(0)+window(4,sinks=1)/sum",
    "poly(0)+window(3,sinks=1,kept=2)/sum",
    "taylor(2,about=mean)+window(2,kept=3)/l2",
    "taylor(2)+window(2,sinks=1,kept=2)*in*forget/sum*out",
]


class TestPublished(SpecLaws):
    specs = PUBLISHED


class TestOwn(SpecLaws):
    specs = OWN
