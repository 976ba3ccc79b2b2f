//! A rig for tests: transports over simulated NICs, wired together without an engine.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use rerail_verbs::sim::{FabricOptions, NicId, NicOptions, NodeId, PortId, RealTimeFabric};
use rerail_verbs::{AccessFlags, ControlThread, HostMemory, RdmaOpcode};

use super::connector::Connector;
use super::memory::RegisteredMemory;
use super::nic::Nic;
use super::rail::{Peer, PeerNic, PeerSpec};
use super::signaling::{Boxed, SignalError};
use super::slice::{Piece, Span};
use super::transfer::{OnFinished, TransferSpec};
use super::transport::RdmaTransport;
use super::{Clock, Identity, Offer, RdmaConfig, Signaling, Transfer};
use crate::TransferError;
use crate::machine::ids::PeerId;

pub(super) const LIMIT: Duration = Duration::from_secs(20);
pub(super) const KIB: u64 = 1024;

/// Carries messages between connectors, and keeps what it has carried.
#[derive(Default)]
pub(super) struct Wire {
    pub(super) servers: Mutex<HashMap<String, Connector>>,
    pub(super) carried: Mutex<Vec<Offer>>,
    /// Refuses what comes from NIC paths that have this text in them, with these words.
    pub(super) refusal: Mutex<Option<(&'static str, &'static str)>>,
    /// Loses requests to close.
    pub(super) loses_closes: AtomicBool,
    /// Answers nothing.
    pub(super) is_silent: AtomicBool,
    /// Takes out of every message what C++ engines do not know.
    pub(super) is_cpp: AtomicBool,
}

impl Wire {
    /// The message as it arrives.
    fn as_carried(&self, offer: Offer) -> Offer {
        if !self.is_cpp.load(Ordering::SeqCst) {
            return offer;
        }
        Offer {
            psn: None,
            path_mtu: None,
            rd_atomic: None,
            instance: None,
            peer_instance: None,
            ..offer
        }
    }
}

impl Signaling for Arc<Wire> {
    fn exchange(&self, server: &str, offer: Offer) -> Boxed<Result<Offer, SignalError>> {
        self.carried.lock().expect("whole").push(offer.clone());
        let refusal = *self.refusal.lock().expect("whole");
        let refusal = refusal.filter(|(from, _)| offer.local_path.contains(from));
        let connector = self.servers.lock().expect("whole").get(server).cloned();
        let (wire, offer) = (Self::clone(self), self.as_carried(offer));
        let lost = offer.qp_nums.is_empty() && self.loses_closes.load(Ordering::SeqCst);
        let is_silent = self.is_silent.load(Ordering::SeqCst);
        Box::pin(async move {
            if is_silent {
                std::future::pending::<()>().await;
            }
            if lost {
                return Err(SignalError::NoAnswer("lost".into()));
            }
            if let Some((_, words)) = refusal {
                return Err(SignalError::Refused(words.into()));
            }
            let connector = connector.ok_or_else(|| SignalError::NoAnswer("no server".into()))?;
            let answer = connector.accept(offer).await;
            answer
                .map(|offer| wire.as_carried(offer))
                .map_err(SignalError::Refused)
        })
    }
}

pub(super) struct Rig {
    pub(super) runtime: tokio::runtime::Runtime,
    pub(super) fabric: RealTimeFabric,
    pub(super) wire: Arc<Wire>,
    pub(super) hosts: Vec<(NodeId, Vec<NicId>)>,
}

pub(super) fn rig(seed: u64, nics: u8) -> Rig {
    let fabric = RealTimeFabric::start(FabricOptions::card(seed)).expect("a thread");
    let hosts = (0..2_u8).map(|host| {
        let node = fabric.add_node(&format!("host{host}"));
        let nics = (0..nics).map(|nic| {
            let address = IpAddr::from([10, 0, host, nic + 1]);
            fabric.add_nic(node, &NicOptions::ethernet(&format!("sim{nic}"), address))
        });
        (node, nics.collect())
    });
    let hosts = hosts.collect();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build();
    Rig {
        runtime: runtime.expect("a runtime"),
        fabric,
        wire: Arc::default(),
        hosts,
    }
}

impl Rig {
    /// A transport whose server name is `host0` or `host1`. A later one takes the name over.
    pub(super) fn transport(&self, host: usize, instance: &str) -> RdmaTransport {
        self.transport_with(host, instance, RdmaConfig::default())
    }

    /// The same with settings of its own.
    pub(super) fn transport_with(
        &self,
        host: usize,
        instance: &str,
        config: RdmaConfig,
    ) -> RdmaTransport {
        let process = self.fabric.add_process(self.hosts[host].0);
        let identity = Identity {
            server: format!("host{host}"),
            instance: Some(instance.to_owned()),
        };
        let transport = RdmaTransport::open(
            &self.fabric.devices_of(process),
            &[],
            config,
            Clock::start(),
            identity,
            Arc::new(Arc::clone(&self.wire)),
            self.runtime.handle().clone(),
        );
        let transport = transport.expect("a transport");
        let mut servers = self.wire.servers.lock().expect("whole");
        servers.insert(format!("host{host}"), transport.connector().clone());
        drop(servers);
        transport
    }

    pub(super) fn port(&self, host: usize, nic: usize) -> PortId {
        self.hosts[host].1[nic].port(1)
    }

    pub(super) fn asks(&self) -> u64 {
        let carried = self.wire.carried.lock().expect("whole");
        let asks = carried
            .iter()
            .filter(|offer| offer.ready_ack == Some(false));
        asks.count() as u64
    }
}

pub(super) fn peer_of(own: &RdmaTransport, id: u64, peer: &RdmaTransport) -> Arc<Peer> {
    let identity = peer.identity();
    let nics = peer.nics().iter().map(|nic| PeerNic {
        index: nic.index().0,
        path: identity.path(nic),
        gid: nic.facts().expect("usable").gid.gid,
        lid: nic.facts().expect("usable").lid,
    });
    own.peer(PeerSpec {
        id: PeerId(id),
        segment: identity.server.clone(),
        server: identity.server.clone(),
        instance: identity.instance.clone(),
        nics: nics.collect(),
    })
}

pub(super) fn registered(transport: &RdmaTransport, length: u64) -> RegisteredMemory {
    let memory = HostMemory::allocate(length as usize).expect("memory");
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    transport.register(&memory, access).expect("registered")
}

/// The control thread of a NIC's device, which does nothing until what is returned is dropped.
pub(super) fn stuck(nic: &Nic) -> (ControlThread, mpsc::Sender<()>) {
    let opening = nic.opening().expect("open");
    let control = opening.context().control().clone();
    let (free, held) = mpsc::channel();
    control.execute(move || hold(&held)).expect("there is room");
    (control, free)
}

/// Has whoever calls it do nothing else until the other end is dropped.
pub(super) fn hold(held: &mpsc::Receiver<()>) {
    // Ends with an error.
    let _ = held.recv();
}

#[derive(Default)]
pub(super) struct Finish(OnceLock<Option<TransferError>>);

impl OnFinished for Finish {
    fn finished(&self, transfer: &Transfer) {
        let first = self.0.set(transfer.error().cloned());
        assert!(first.is_ok(), "finished once");
    }
}

impl Finish {
    pub(super) fn wait(&self) -> Result<(), TransferError> {
        wait_until("the transfer is finished", || self.0.get().is_some());
        match self.0.get() {
            Some(Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

pub(super) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) struct Move<'a> {
    pub(super) own: &'a RdmaTransport,
    pub(super) peer: &'a Arc<Peer>,
    pub(super) source: &'a RegisteredMemory,
    pub(super) target: &'a RegisteredMemory,
    pub(super) length: u64,
    pub(super) time: Duration,
    /// Added to the remote key.
    pub(super) key_error: u32,
}

impl<'a> Move<'a> {
    /// A move of all of `source`, with much time.
    pub(super) fn all(
        own: &'a RdmaTransport,
        peer: &'a Arc<Peer>,
        source: &'a RegisteredMemory,
        target: &'a RegisteredMemory,
    ) -> Self {
        Self {
            own,
            peer,
            source,
            target,
            length: source.memory().length() as u64,
            time: LIMIT,
            key_error: 0,
        }
    }

    pub(super) fn write(&self) -> (Arc<Transfer>, Arc<Finish>) {
        let length = self.length;
        let local = Span::new(self.source.memory().addr(), length, self.source.pieces());
        let remote = self.target.keys().into_iter().map(|chunk| {
            let keys = chunk.rkeys.iter();
            let keys = keys.map(|key| key.wrapping_add(self.key_error));
            Piece::new(chunk.addr, chunk.length, keys)
        });
        let remote = Span::new(self.target.memory().addr(), length, remote);
        let spec = TransferSpec {
            peer: Arc::clone(self.peer),
            opcode: RdmaOpcode::Write,
            local: local.expect("registered"),
            remote: remote.expect("registered"),
            length,
            slicing: self.own.config().slicing,
            cut_off: self.own.clock().now() + self.time,
            limit: self.time,
        };
        let finish = Arc::new(Finish::default());
        (self.own.submit(spec, finish.clone()), finish)
    }

    pub(super) fn run(&self) -> Result<(), TransferError> {
        self.write().1.wait()
    }
}
