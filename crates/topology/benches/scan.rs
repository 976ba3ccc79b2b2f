//! Scanning a server of 16 NICs and 8 GPUs with tables of 256 slots; the target is less than 40 ms.

#[path = "../tests/fixture/mod.rs"]
mod fixture;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rerail_topology::{Scan, Topology, TopologyOptions};

fn benchmark(criterion: &mut Criterion) {
    let tree = fixture::switched_server(16, 256);
    criterion.bench_function("scan 16 NICs, 8 GPUs", |bencher| {
        bencher.iter(|| {
            let scan = Scan::read(black_box(tree.root())).expect("the tree is there");
            let topology = Topology::new(scan, &TopologyOptions::default());
            assert_eq!(topology.expect("a topology").rails.len(), 16);
        });
    });
}

criterion_group!(benches, benchmark);
criterion_main!(benches);
