//! HTTP over TLS, with our server behind a proxy that ends it.

#![cfg(all(feature = "http", feature = "server"))]

mod common;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::{BAD_FILES, Eavesdropper, make_certificates};
use rerail_metadata::server::{MetadataServer, ServerOptions};
use rerail_metadata::{
    HttpStore, MetadataError, MetadataStore, Secret, StoreOptions, StoreUrl, conformance, connect,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{RootCertStore, ServerConfig, crypto::ring, server::WebPkiClientVerifier};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// Our server behind TLS with the certificate in `dir`, under two names of this machine; the
/// certificate is for the first. `clients_too`: clients must show one, too.
async fn serve(dir: &Path, clients_too: bool) -> [SocketAddr; 2] {
    let server = MetadataServer::open(ServerOptions::default()).expect("opened");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
    let plain = listener.local_addr().expect("an address");
    tokio::spawn(server.serve(listener, std::future::pending()));

    let certificates = |name: &str| {
        let found = CertificateDer::pem_file_iter(dir.join(name)).expect("a file");
        found.collect::<Result<Vec<_>, _>>().expect("certificates")
    };
    let provider = Arc::new(ring::default_provider());
    let config = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("versions");
    let config = if clients_too {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(certificates("ca.pem"));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider).build();
        config.with_client_cert_verifier(verifier.expect("a verifier"))
    } else {
        config.with_no_client_auth()
    };
    let key = PrivateKeyDer::from_pem_file(dir.join("key.pem")).expect("a key");
    let config = config.with_single_cert(certificates("cert.pem"), key);
    let acceptor = TlsAcceptor::from(Arc::new(config.expect("a configuration")));
    let mut addresses = Vec::new();
    for host in ["127.0.0.1:0", "127.0.0.2:0"] {
        let listener = TcpListener::bind(host).await.expect("listens");
        addresses.push(listener.local_addr().expect("an address"));
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut client) = acceptor.accept(client).await else {
                        return;
                    };
                    let mut server = TcpStream::connect(plain).await.expect("our server");
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
    }
    addresses.try_into().expect("two")
}

fn open(address: impl std::fmt::Display, options: &StoreOptions) -> HttpStore {
    let url = format!("https://{address}/metadata");
    HttpStore::new(&url, None, options).expect("a client")
}

fn trusting(dir: &Path) -> StoreOptions {
    let mut options = StoreOptions::default();
    options.tls.ca = Some(dir.join("ca.pem"));
    options
}

#[tokio::test]
async fn https_conforms() {
    let dir = tempfile::tempdir().expect("a directory");
    make_certificates(dir.path());
    let [address, _] = serve(dir.path(), false).await;
    let url = StoreUrl::parse(&format!("https://{address}/metadata")).expect("a URL");
    let store = connect(&url, &trusting(dir.path())).await.expect("a store");
    let report = conformance::run(store, "mooncake/conformance/").await;
    report.unwrap_or_else(|failure| panic!("{failure}"));
    // By name, too.
    let store = open(
        format!("localhost:{}", address.port()),
        &trusting(dir.path()),
    );
    store.put("k", Bytes::new(), None).await.expect("put");
}

#[tokio::test]
async fn m28_bad_tls_files_fail_with_the_cause_and_never_fall_back_to_plaintext() {
    let dir = tempfile::tempdir().expect("a directory");
    let other = tempfile::tempdir().expect("a directory");
    make_certificates(dir.path());
    make_certificates(other.path());
    let [address, other_name] = serve(dir.path(), true).await;
    let mut good = trusting(dir.path());
    good.deadline = Duration::from_secs(10);
    good.tls.certificate = Some(dir.path().join("cert.pem"));
    good.tls.key = Some(dir.path().join("key.pem"));
    let store = open(address, &good);
    store.put("k", Bytes::new(), None).await.expect("over TLS");

    let url = format!("https://{address}/metadata");
    for bad in BAD_FILES {
        let mut options = good.clone();
        let path = bad.set(&mut options, dir.path(), other.path());
        let error = HttpStore::new(&url, None, &options).expect_err(bad.what);
        assert!(matches!(error, MetadataError::Setting { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
    }
    let refused = async |what: &str, address, options: &StoreOptions| {
        let error = open(address, options).get("k").await.expect_err(what);
        assert!(!error.is_not_found(), "{what}: {error}");
        error.to_string()
    };
    let mut options = good.clone();
    options.tls.ca = Some(other.path().join("ca.pem"));
    let error = refused("another authority", address, &options).await;
    assert!(error.contains("certificate"), "{error}");
    let error = refused("another name", other_name, &good).await;
    assert!(error.contains("certificate"), "{error}");
    let mut options = good.clone();
    options.tls.certificate = Some(other.path().join("cert.pem"));
    options.tls.key = Some(other.path().join("key.pem"));
    refused("a client that it does not know", address, &options).await;
    refused("no client certificate", address, &trusting(dir.path())).await;

    // Files for TLS and a URL without it are a contradiction, not a choice.
    let plain = HttpStore::new("http://127.0.0.1:1/metadata", None, &good);
    let error = plain.expect_err("plaintext").to_string();
    assert!(error.contains("https://"), "{error}");

    let listener = Eavesdropper::start();
    let mut options = good.clone();
    options.token = Some(Secret::new("s3cret"));
    let store = open(format!("127.0.0.1:{}", listener.port), &options);
    store.get("k").await.expect_err("no TLS there");
    store
        .put("k", Bytes::new(), None)
        .await
        .expect_err("no TLS");
    listener.assert_only_tls();
}
