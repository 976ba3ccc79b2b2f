//! What an engine tells its metadata store.
#![cfg(feature = "http")]

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;

use rerail_engine::{Engine, EngineConfig, Transport};
use rerail_verbs::DeviceList;

#[test]
fn credentials_from_variables_reach_the_store() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("bound");
    let settings = |variable: &str| match variable {
        "RERAIL_METADATA_TOKEN" => Some("t0ken".to_owned()),
        "MC_TCP_BIND_ADDRESS" => Some("127.0.0.1".to_owned()),
        _ => None,
    };
    let url = format!("http://{address}/metadata");
    let mut config = EngineConfig::with_settings(&url, "a", &settings).expect("valid");
    config.transport = Transport::Tcp;
    let engine = Engine::start(config, &DeviceList::default()).expect("stores may be away");
    let (stream, _) = listener.accept().expect("it publishes its record");
    let mut head = BufReader::new(stream).lines().map_while(Result::ok);
    assert!(
        head.by_ref()
            .take_while(|line| !line.is_empty())
            .any(|line| line.eq_ignore_ascii_case("authorization: Bearer t0ken"))
    );
    // Nobody answers it any more.
    drop((head, listener));
    drop(engine);
}
