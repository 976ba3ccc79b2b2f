//! Engines in the scenario's own process.

use anyhow::Result;
use rerail_engine::{Engine, EngineConfig, Events, MemoryOptions};
use rerail_verbs::HostMemory;

/// An engine over these devices, without a store.
pub(super) fn engine(name: &str, devices: &[&str]) -> Result<Engine> {
    engine_in("P2PHANDSHAKE", name, devices, Events::default())
}

/// The same in the store `metadata`, which tells what happens to `events`.
pub(super) fn engine_in(
    metadata: &str,
    name: &str,
    devices: &[&str],
    events: Events,
) -> Result<Engine> {
    let mut config = EngineConfig::new(metadata, name)?;
    config.devices = devices.iter().map(|&device| device.to_owned()).collect();
    config.advertise = Some("127.0.0.1".to_owned());
    config.events = events;
    Ok(Engine::start(config, &rerail_verbs::ibv::devices()?)?)
}

/// Registered memory.
pub(super) fn memory(engine: &Engine, length: usize) -> Result<HostMemory> {
    let memory = HostMemory::allocate(length)?;
    engine.register(&memory, MemoryOptions::default())?;
    Ok(memory)
}
