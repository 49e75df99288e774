"""What the pool holds."""

from tests.unit.study.making import make_record, study_record

from maclaurin.study.pool import Pool, pool_use
from maclaurin.study.run_record import write_study


def test_the_pool_knows_who_uses_what(tmp_path):
    pool = Pool(tmp_path / "pool")
    used, unused = make_record(seed=0), make_record(seed=1)
    for record in (used, unused):
        pool.entry(record.key).write(record)
    (pool.entry(used.key).path / "model").mkdir()
    (pool.entry(used.key).path / "model" / "weights").write_bytes(b"x" * 1000)
    write_study(study_record({"a": {0: used}}), tmp_path / "mini" / "records.json")
    found = {use.entry.path.name: use for use in pool_use(pool, tmp_path)}
    assert found[used.key].studies == ("mini",)
    assert found[used.key].model_bytes == 1000
    assert found[unused.key].studies == ()
    assert found[used.key].size > found[unused.key].size
