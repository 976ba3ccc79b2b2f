//! The NUMA node of a page.
//!
//! The kernel is asked about the page itself (`move_pages`). Where it forbids that, as the default
//! profile of containers does, `/proc/self/numa_maps` has to do: it counts pages by node for each
//! mapping, not for ranges of it, so that a node is known there only where all of a mapping lies in
//! one. Memory of devices is not detected here; its owner names it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use crate::Location;

/// Longest line that is read; the kernel's have a few hundred bytes.
const LINE_BYTES_MAX: u64 = 16 * 1024;

/// The location of the page at `address` in this process: `cpu:N`, or [`Location::Any`] for memory
/// that was never touched, which lies nowhere yet, and where the answer is not known.
///
/// # Errors
///
/// Neither way is open, for example because the kernel has no NUMA.
pub fn location_of(address: u64) -> io::Result<Location> {
    match rerail_verbs::node_of_page(address) {
        Ok(node) => Ok(node.map_or(Location::Any, Location::Cpu)),
        Err(_) => find(BufReader::new(File::open("/proc/self/numa_maps")?), address),
    }
}

/// `maps` has a line for each mapping, by ascending address. It does not say where a mapping ends,
/// so `address` has to lie in one.
fn find(mut maps: impl BufRead, address: u64) -> io::Result<Location> {
    let mut found = Location::Any;
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = io::Read::take(&mut maps, LINE_BYTES_MAX);
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Ok(found);
        }
        let text = String::from_utf8_lossy(&line);
        let mut fields = text.split_whitespace();
        let start = fields
            .next()
            .and_then(|text| u64::from_str_radix(text, 16).ok());
        match start {
            Some(start) if start > address => return Ok(found),
            Some(_) => found = only_node(fields).map_or(Location::Any, Location::Cpu),
            None => {}
        }
    }
}

/// `N0=12 N1=3` are pages by node.
fn only_node<'t>(fields: impl Iterator<Item = &'t str>) -> Option<u32> {
    let mut nodes = fields.filter_map(|field| {
        let (node, pages) = field.strip_prefix('N')?.split_once('=')?;
        let node = node.parse::<u32>().ok()?;
        pages.parse::<u64>().ok().filter(|pages| *pages > 0)?;
        Some(node)
    });
    let first = nodes.next()?;
    nodes.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
        00400000 default file=/bin/x mapped=3 N1=3 kernelpagesize_kB=4\n\
        7f0000000000 default anon=12 dirty=12 N0=9 N1=3 kernelpagesize_kB=4\n\
        7f0000100000 bind:1 anon=512 dirty=512 N1=512 kernelpagesize_kB=2048\n\
        7f0000200000 default\n";

    #[test]
    fn a_page_is_where_all_of_its_mapping_is() {
        let node = |address| find(MAPS.as_bytes(), address).expect("text").to_string();
        assert_eq!(node(0x40_0000), "cpu:1");
        assert_eq!(node(0x7f00_0000_0010), "*", "spread over two nodes");
        assert_eq!(node(0x7f00_0010_0000), "cpu:1");
        assert_eq!(node(0x7f00_0020_0000), "*", "never touched");
        assert_eq!(node(0x10), "*", "before the first mapping");
    }

    #[test]
    fn ones_own_touched_memory_is_on_a_node_or_unknown() {
        let touched = vec![1_u8; 1 << 20];
        let address = touched.as_ptr() as u64;
        match location_of(address) {
            Ok(location) if rerail_verbs::node_of_page(address).is_ok() => {
                assert!(matches!(location, Location::Cpu(_)), "{location}");
            }
            Ok(location) => assert!(matches!(location, Location::Cpu(_) | Location::Any)),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound, "no NUMA"),
        }
    }

    #[test]
    fn pages_of_one_mapping_are_told_apart() {
        // Untouched pages beside a touched one: by mapping they would all be on its node.
        let memory = rerail_verbs::HostMemory::allocate(1 << 22).expect("memory");
        let first = memory.addr();
        if rerail_verbs::node_of_page(first).is_err() {
            eprintln!("left out: the kernel does not tell nodes of pages");
            return;
        }
        memory.copy_in(0, &[1]).expect("in bounds");
        assert!(matches!(
            location_of(first).expect("an answer"),
            Location::Cpu(_)
        ));
        let far = location_of(first + (1 << 21) + 8192).expect("an answer");
        assert_eq!(far, Location::Any, "never touched");
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_survived(text: String, address: u64) {
            let _ = find(text.as_bytes(), address);
        }
    }
}
