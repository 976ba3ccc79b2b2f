//! Our HTTP server within a test.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{HttpStore, StoreOptions};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A server. Dropping it stops it as a crash would: connections are cut.
pub struct Server {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub async fn start(options: ServerOptions, address: Option<SocketAddr>) -> Self {
        let address = address.unwrap_or_else(|| ([127, 0, 0, 1], 0).into());
        let mut attempts = 0;
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(error) if attempts > 50 => panic!("cannot listen on {address}: {error}"),
                Err(_) => attempts += 1,
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let address = listener.local_addr().expect("an address");
        let (stop, stopped) = oneshot::channel();
        let server = MetadataServer::open(options).expect("options are valid");
        let task = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            server.serve(listener, stopped).await;
        });
        Self {
            address,
            stop: Some(stop),
            task,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}/metadata", self.address)
    }

    pub fn client(&self) -> HttpStore {
        HttpStore::new(&self.url(), None, &StoreOptions::default()).expect("a client")
    }

    pub async fn stop(mut self) -> SocketAddr {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        let _ = (&mut self.task).await;
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A client as others write them, without TLS.
pub fn plain_client() -> reqwest::Client {
    let tls = rustls::ClientConfig::builder_with_provider(
        rustls::crypto::ring::default_provider().into(),
    )
    .with_safe_default_protocol_versions()
    .expect("versions")
    .with_root_certificates(rustls::RootCertStore::empty())
    .with_no_client_auth();
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .no_proxy();
    client.build().expect("a client")
}

pub fn on_disk(dir: &Path) -> ServerOptions {
    let mut options = ServerOptions::default();
    options.data_dir = Some(dir.to_owned());
    options
}
