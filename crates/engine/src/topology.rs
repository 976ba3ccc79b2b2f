//! Where memory lies and which NICs are near it: the matrix of the own record, and the choice of
//! NICs at both ends of a request.
//!
//! Deliberately not here: how far things are from each other, which is `rerail-topology`'s.

use std::collections::BTreeMap;
use std::path::Path;

use rerail_metadata::descriptor::{Buffer, LocationNics, SegmentDescriptor};
use rerail_topology::{
    Location, Matrix, Rail, Scan, Topology, TopologyError, TopologyOptions, page,
};
use rerail_transport::rdma::{NicSet, Nics};
use rerail_verbs::HostMemory;

use crate::memory::WILDCARD_LOCATION;
use crate::{EngineError, Result};

/// The own machine, as far as the engine's NICs are concerned.
#[derive(Debug, Default)]
pub(crate) struct Places {
    matrix: Matrix,
    /// Names of the NICs, in the order of the record's `devices[]`.
    nics: Vec<String>,
}

impl Places {
    /// Reads the machine, and finds out what is near these NICs. A NIC that sysfs does not know, as
    /// simulated ones, is as near as any.
    ///
    /// # Errors
    ///
    /// A custom matrix that cannot be used: nothing falls back to discovery silently.
    pub(crate) fn read(options: &TopologyOptions, nics: &Nics) -> Result<Self> {
        let scan = Scan::read(Path::new("/")).map_err(refused)?;
        let rails = nics.iter().map(|nic| Rail {
            name: nic.name().to_owned(),
            device: nic.device().to_owned(),
            port: nic.port(),
            rate_mbps: nic.facts().map_or(0, |facts| facts.speed_mbps),
        });
        Self::new(scan, rails.collect(), options)
    }

    fn new(scan: Scan, rails: Vec<Rail>, options: &TopologyOptions) -> Result<Self> {
        let topology = Topology::with_rails(scan, rails, options).map_err(refused)?;
        // What the scan says of NICs that are not used is no concern of the engine's.
        for warning in &topology.warnings {
            tracing::debug!(%warning, "topology");
        }
        Ok(Self {
            nics: topology.rails.into_iter().map(|rail| rail.name).collect(),
            matrix: topology.matrix,
        })
    }

    /// The matrix as it is published. A NIC that a custom one leaves out is in no entry, and so not
    /// used by peers; one that names no NIC at all is a mistake that must not cut the engine off.
    pub(crate) fn matrix(&self) -> BTreeMap<String, LocationNics> {
        let entries = self.matrix.entries().map(|(location, entry)| {
            let nics = LocationNics {
                preferred: entry.preferred.clone(),
                available: entry.available.clone(),
            };
            (location.to_owned(), nics)
        });
        let mut matrix: BTreeMap<_, _> = entries.collect();
        if self.matrix.names().next().is_none() {
            let all = LocationNics {
                preferred: self.nics.clone(),
                available: Vec::new(),
            };
            matrix.insert(WILDCARD_LOCATION.to_owned(), all);
        }
        matrix
    }

    /// The own NICs near memory at `location`.
    pub(crate) fn near(&self, location: &str) -> NicSet {
        let Some(entry) = self.matrix.entry(location) else {
            return NicSet::ALL;
        };
        let position = |name: &String| self.nics.iter().position(|nic| nic == name);
        entry.preferred.iter().filter_map(position).collect()
    }
}

fn refused(cause: TopologyError) -> EngineError {
    EngineError::Invalid {
        what: "the topology of this machine",
        reason: cause.to_string(),
    }
}

/// Checks a location that a user gives.
pub(crate) fn check(location: &str) -> Result<()> {
    match location.parse::<Location>() {
        Ok(_) => Ok(()),
        Err(error) => Err(EngineError::Invalid {
            what: "location of memory",
            reason: error.to_string(),
        }),
    }
}

/// Where memory lies: as its owner says, else the NUMA node of its pages. They have to have been
/// touched, which registering with a NIC does; memory on several nodes stays `*`.
pub(crate) fn locate(memory: &HostMemory, said: &str) -> String {
    if said != WILDCARD_LOCATION {
        return said.to_owned();
    }
    match page::location_of(memory.addr()) {
        Ok(location) => location.to_string(),
        Err(error) => {
            tracing::debug!(%error, "the kernel does not tell on which NUMA node memory lies");
            WILDCARD_LOCATION.to_owned()
        }
    }
}

/// A peer's NICs near the byte at `addr` of one of its buffers, each by the `position` of its name.
pub(crate) fn near_buffer(
    peer: &SegmentDescriptor,
    buffer: &Buffer,
    addr: u64,
    position: impl Fn(&String) -> Option<usize>,
) -> NicSet {
    let Ok(location) = buffer.name.parse::<Location>() else {
        return NicSet::ALL;
    };
    let location = location.at(addr.saturating_sub(buffer.addr), buffer.length);
    let Some(entry) = peer.priority_matrix.get(&location.to_string()) else {
        return NicSet::ALL;
    };
    // By name: positions in a matrix mean nothing (reference 4.4).
    entry.preferred.iter().filter_map(position).collect()
}

#[cfg(test)]
mod tests {
    use rerail_metadata::descriptor::{Device, Protocol};
    use rerail_topology::CustomMatrix;
    use rerail_verbs::Gid;

    use super::*;

    fn rails(names: &[&str]) -> Vec<Rail> {
        let rail = |name: &&str| Rail {
            name: (*name).to_owned(),
            device: (*name).to_owned(),
            port: 1,
            rate_mbps: 0,
        };
        names.iter().map(rail).collect()
    }

    fn places(names: &[&str], custom: Option<&str>) -> Result<Places> {
        let scan = Scan {
            nics: Vec::new(),
            gpus: Vec::new(),
            netdevs: Vec::new(),
            nodes: vec![0, 1],
            warnings: Vec::new(),
        };
        let options = TopologyOptions {
            custom: custom.map(|text| CustomMatrix::Inline(text.to_owned())),
            ..TopologyOptions::default()
        };
        Places::new(scan, rails(names), &options)
    }

    #[test]
    fn nics_of_unknown_place_are_near_every_node_and_published_in_order() {
        let places = places(&["rxe_b", "rxe_a"], None).expect("nothing to refuse");
        let matrix = places.matrix();
        let locations: Vec<&String> = matrix.keys().collect();
        assert_eq!(locations, ["cpu:0", "cpu:1"]);
        for nics in matrix.values() {
            assert_eq!(nics.preferred, ["rxe_b", "rxe_a"]);
        }
        assert_eq!(places.near("cpu:7"), NicSet::ALL);
    }

    #[test]
    fn t09_a_custom_matrix_decides_and_an_unknown_name_in_it_is_refused() {
        let text = r#"{"cpu:0":[["b"],["a"]],"cpu:1":[["a"],["b"]]}"#;
        let places = places(&["a", "b"], Some(text)).expect("names that exist");
        assert!(!places.near("cpu:0").contains(0));
        assert!(places.near("cpu:0").contains(1));
        assert_eq!(places.matrix()["cpu:1"].available, ["b"]);
        let error = super::tests::places(&["a", "b"], Some(r#"{"cpu:0":[["mlx"],[]]}"#));
        let error = error.expect_err("no such NIC").to_string();
        assert!(error.contains("mlx"), "{error}");
    }

    #[test]
    fn a_custom_matrix_without_nics_leaves_all_reachable() {
        let matrix = |text| places(&["a", "b"], Some(text)).expect("valid").matrix();
        assert!(!matrix(r#"{"cpu:0":[["a"],[]]}"#).contains_key(WILDCARD_LOCATION));
        assert_eq!(matrix("{}")[WILDCARD_LOCATION].preferred, ["a", "b"]);
    }

    #[test]
    fn a_peers_matrix_is_read_by_name_and_by_the_bytes_of_a_segmented_buffer() {
        let mut peer = SegmentDescriptor::new("peer", Protocol::rdma());
        // In another order than in the matrix.
        for name in ["n1", "n0"] {
            peer.devices.push(Device::new(name, 0, Gid::NULL));
        }
        for (location, nic) in [("cpu:0", "n0"), ("cpu:1", "n1")] {
            let nics = LocationNics {
                preferred: vec![nic.to_owned()],
                available: Vec::new(),
            };
            peer.priority_matrix.insert(location.to_owned(), nics);
        }
        let buffer = |name: &str| Buffer {
            name: name.to_owned(),
            addr: 0x1000,
            length: 0x2000,
            ..Buffer::default()
        };
        let only = |position: usize| [position].into_iter().collect::<NicSet>();
        let position = |name: &String| ["n1", "n0"].iter().position(|nic| nic == name);
        let near_buffer = |peer: &_, buffer: &_, addr| near_buffer(peer, buffer, addr, position);
        assert_eq!(near_buffer(&peer, &buffer("cpu:0"), 0x1000), only(1));
        let segmented = buffer("segments:4096:0,1");
        assert_eq!(near_buffer(&peer, &segmented, 0x1fff), only(1));
        assert_eq!(near_buffer(&peer, &segmented, 0x2000), only(0));
        for unknown in ["*", "cpu:9", "gpu memory"] {
            assert_eq!(near_buffer(&peer, &buffer(unknown), 0x1000), NicSet::ALL);
        }
    }

    #[test]
    fn locations_that_nobody_knows_are_refused() {
        for location in ["*", "cpu:1", "cuda:0", "segments:4096:0,1"] {
            check(location).expect(location);
        }
        assert!(check("socket 0").is_err());
    }
}
