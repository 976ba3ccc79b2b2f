//! Ranking a full table of 256 rows; the target is less than 10 µs.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rerail_topology::gid::{GidPolicy, PortTable, rank};
use rerail_topology::{NetdevFacts, NetdevKind};
use rerail_verbs::{Gid, GidEntry, GidType, LinkLayer, Netdev};

fn benchmark(criterion: &mut Criterion) {
    let netdevs: Vec<_> = (0..8)
        .map(|number| NetdevFacts {
            kind: if number == 0 {
                NetdevKind::Plain
            } else {
                NetdevKind::Vlan
            },
            up: Some(true),
            ..NetdevFacts::named(format!("eth0.{number}"))
        })
        .collect();
    let entries: Vec<_> = (0..256_u32)
        .map(|index| GidEntry {
            index,
            gid: match index % 4 {
                0 | 1 => Gid([
                    0xfe,
                    0x80,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    2,
                    0,
                    0x11,
                    0xff,
                    0xfe,
                    0,
                    0,
                    index as u8,
                ]),
                _ => Gid::from_ipv4([10, 0, 0, index as u8].into()),
            },
            gid_type: if index % 2 == 0 {
                GidType::RoceV1
            } else {
                GidType::RoceV2
            },
            netdev: Some(Netdev {
                index: 0,
                name: format!("eth0.{}", index / 4 % 8),
            }),
        })
        .collect();
    let table = PortTable {
        device: "mlx5_0",
        port: 1,
        link_layer: LinkLayer::Ethernet,
        table_len: Some(256),
        entries: &entries,
        unreadable: &[],
        netdevs: &netdevs,
    };
    let policy = GidPolicy::default();
    criterion.bench_function("rank 256 rows", |bencher| {
        bencher.iter(|| rank(black_box(&table), black_box(&policy)));
    });
}

criterion_group!(benches, benchmark);
criterion_main!(benches);
