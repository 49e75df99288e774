"""Common words to make facts and sequences of; most are one token in most vocabularies."""

from __future__ import annotations

_NAMES = """
Adam Alice Anna Arthur Barbara Ben Carl Charles Clara Daniel David Diana Edward Ellen Emma Eric Frank George
Grace Hannah Harry Helen Henry Jack James Jane John Julia Karen Kate Laura Leo Linda Louis Lucy Maria Mark
Martin Mary Max Michael Nina Oliver Oscar Paul Peter Rachel Richard Robert Rose Ruth Sam Sarah Simon Sophie
Susan Thomas Victor Walter William
"""
_THINGS = """
apple arm army baby ball bank bear bed bell bird boat body bone book box bread bridge brother butter camp
car card cat chain chair cheese church circle city clock cloud coat coffee corn cotton cup daughter desert
dog door dream dress drum ear egg engine eye face farm father field finger fire fish flag floor flower foot
forest fruit garden gate glass gold grass hair hammer hand hat heart hill horse hotel house ice iron island
jacket key king kitchen knife lake lamp leaf leg lemon letter lion lip market milk mirror money moon mother
mountain mouse mouth music neck needle night nose oil orange page paint paper park pen phone piano picture
pipe plane plant plate pocket pool potato prince queen rain ring river road rock roof room root rope sail
salt sand school seed shadow sheep ship shirt shoe silver sister skin sky smoke snake snow soap soldier son
song spoon spring square stamp star station stone storm street sugar summer sun table tail teacher tent
tiger tongue tooth tower town train tree truck valley village voice wall watch water wave wheel wind window
wine wing winter wolf wood wool yard
"""

NAMES = tuple(_NAMES.split())
THINGS = tuple(_THINGS.split())
