//! A port that leads to a server, and to another one when the test says so.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Ends with the test's runtime.
pub struct Forward {
    pub address: SocketAddr,
    target: Arc<Mutex<SocketAddr>>,
    cut: watch::Sender<u64>,
}

impl Forward {
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listens");
        let address = listener.local_addr().expect("an address");
        let target = Arc::new(Mutex::new(at(port)));
        let (cut, cuts) = watch::channel(0);
        let shared = Arc::clone(&target);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *shared.lock().expect("lock");
                let mut cuts = cuts.clone();
                cuts.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(target).await else {
                        return;
                    };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        Self {
            address,
            target,
            cut,
        }
    }

    /// Cuts all connections; new ones lead to `port`.
    pub fn switch(&self, port: u16) {
        *self.target.lock().expect("lock") = at(port);
        self.cut.send_modify(|cuts| *cuts += 1);
    }
}

fn at(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}
