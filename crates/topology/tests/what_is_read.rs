//! What a scan opens, counted by the kernel (inotify): a scan's time is its system calls, and what
//! the operator filtered out is not to be touched.

mod fixture;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use fixture::switched_server;
use rerail_topology::{DeviceFilter, Scan, Topology, TopologyOptions};
use rustix::fs::inotify;

/// How often each file of a directory was opened by `act`. The directory itself does not count.
fn opened(directory: &Path, act: impl FnOnce()) -> BTreeMap<String, u32> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let watch = inotify::init(flags).expect("inotify");
    inotify::add_watch(&watch, directory, inotify::WatchFlags::OPEN).expect("a watch");
    act();
    let mut buffer = [MaybeUninit::uninit(); 8192];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    let mut counts = BTreeMap::new();
    loop {
        match events.next() {
            Ok(event) => {
                assert!(!event.events().contains(inotify::ReadFlags::QUEUE_OVERFLOW));
                if let Some(name) = event.file_name() {
                    let name = OsStr::from_bytes(name.to_bytes()).to_string_lossy();
                    *counts.entry(name.into_owned()).or_default() += 1;
                }
            }
            Err(rustix::io::Errno::AGAIN) => return counts,
            Err(error) => panic!("inotify: {error}"),
        }
    }
}

fn once(names: impl Iterator<Item = u32>) -> BTreeMap<String, u32> {
    names.map(|name| (name.to_string(), 1)).collect()
}

#[test]
fn each_slot_is_read_once_and_its_type_and_interface_only_if_it_is_in_use() {
    let tree = switched_server(16, 64);
    let port = "sys/class/infiniband/mlx5_11/ports/1";
    for (what, expected) in [
        ("gids", once(0..64)),
        ("gid_attrs/types", once(0..4)),
        ("gid_attrs/ndevs", once(0..4)),
    ] {
        let counts = opened(&tree.path(&format!("{port}/{what}")), || {
            Scan::read(tree.root()).expect("a scan");
        });
        assert_eq!(counts, expected, "{what}");
    }
    let attributes = opened(&tree.path(port), || {
        Scan::read(tree.root()).expect("a scan");
    });
    let most = attributes.values().max();
    assert!(most <= Some(&2), "read again and again: {attributes:?}");
}

#[test]
fn t05_what_the_filter_leaves_out_is_never_opened() {
    let tree = switched_server(16, 4);
    let nodes = tree.path("dev/infiniband");
    let read = |list: Option<&str>| {
        let devices = list.map_or_else(DeviceFilter::default, |list| {
            DeviceFilter::parse("--devices", list).expect("a list")
        });
        let options = TopologyOptions {
            devices,
            ..TopologyOptions::default()
        };
        opened(&nodes, || {
            Topology::read(tree.root(), &options).expect("a topology");
        })
    };
    assert_eq!(read(None).len(), 16);
    let some: Vec<_> = read(Some("mlx5_2,mlx5_5:1")).into_keys().collect();
    assert_eq!(some, ["uverbs2", "uverbs5"]);
    // Nor is one whose name another one begins with.
    let one: Vec<_> = read(Some("mlx5_12")).into_keys().collect();
    assert_eq!(one, ["uverbs12"]);
}
