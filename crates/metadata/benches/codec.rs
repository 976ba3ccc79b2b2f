//! Encoding and decoding of descriptors: an ordinary one, and 40 000 buffers on 8 NICs.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rerail_metadata::descriptor::{Buffer, Device, JsonForm, Protocol, SegmentDescriptor};

fn descriptor(buffers: u64) -> SegmentDescriptor {
    let mut segment = SegmentDescriptor::new("node-a:15428", Protocol::rdma());
    for index in 0..8 {
        let gid = std::net::Ipv4Addr::new(10, 0, 0, index + 1);
        let gid = rerail_verbs::Gid::from_ipv4(gid);
        segment
            .devices
            .push(Device::new(format!("mlx5_{index}"), 0, gid));
    }
    for index in 0..buffers {
        segment.buffers.push(Buffer {
            name: "cpu:0".into(),
            addr: 0x7f00_0000_0000 + (index << 20),
            length: 1 << 20,
            rkey: vec![0x00ff_ffff; 8],
            lkey: vec![0x00ff_ffff; 8],
            ..Buffer::default()
        });
    }
    segment
}

fn codec(criterion: &mut Criterion) {
    for (name, buffers) in [("16 buffers", 16), ("40000 buffers", 40_000)] {
        let segment = descriptor(buffers);
        let json = segment.to_json(JsonForm::Bare);
        eprintln!("{name}: JSON has {} bytes", json.len());
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        group.bench_function("JSON encode", |bencher| {
            bencher.iter(|| black_box(&segment).to_json(JsonForm::Bare));
        });
        group.bench_function("JSON decode", |bencher| {
            bencher.iter(|| SegmentDescriptor::from_json(black_box(&json)));
        });
        #[cfg(feature = "bincode")]
        {
            let compact = segment.to_compact().unwrap_or_default();
            eprintln!("{name}: the compact form has {} bytes", compact.len());
            group.bench_function("compact encode", |bencher| {
                bencher.iter(|| black_box(&segment).to_compact());
            });
            group.bench_function("compact decode", |bencher| {
                bencher.iter(|| SegmentDescriptor::from_compact(black_box(&compact)));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, codec);
criterion_main!(benches);
