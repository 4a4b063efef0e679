//! A list of hosts, in Open MPI's form (`node1 slots=4`) or MPICH's (`node1:4`).

use super::LauncherError;

/// A machine and its number of slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Name or address.
    pub name: String,
    /// Number of ranks it takes, if the list gives one.
    pub slots: Option<usize>,
}

/// Reads a list of hosts, one per line; `#` starts a comment.
///
/// # Errors
///
/// [`LauncherError::Hosts`] with the line number.
pub fn parse_hosts(text: &str) -> Result<Vec<Host>, LauncherError> {
    let mut hosts: Vec<Host> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let bad = |expected: &str| LauncherError::Hosts {
            line: number + 1,
            expected: expected.to_string(),
            got: line.trim().to_string(),
        };
        let content = line.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        let mut words = content.split_whitespace();
        let first = words.next().expect("the line is not empty");
        // One colon: MPICH's number of ranks. More: an IPv6 address.
        let (name, mut slots) = match first.split_once(':') {
            Some((name, count)) if !count.contains(':') => (name, Some(count)),
            _ => (first, None),
        };
        for word in words {
            match word.split_once('=') {
                Some(("slots", count)) if slots.is_none() => slots = Some(count),
                Some(("max_slots" | "max-slots", _)) => {}
                _ => return Err(bad("a host and its number of ranks, such as 'node1 slots=4' or 'node1:4'")),
            }
        }
        let slots = match slots.map(str::parse::<usize>) {
            None => None,
            Some(Ok(count)) if count > 0 => Some(count),
            Some(_) => return Err(bad("at least 1 rank")),
        };
        if name.is_empty() || name.contains(',') {
            return Err(bad("the name of a host"));
        }
        if hosts.iter().any(|host| host.name == name) {
            return Err(bad("each host only once; set its number of ranks with slots="));
        }
        hosts.push(Host { name: name.to_string(), slots });
    }
    if hosts.is_empty() {
        return Err(LauncherError::Hosts { line: 1, expected: "at least one host".into(), got: "none".into() });
    }
    Ok(hosts)
}

/// Distributes ranks over the hosts in order. Each host takes up to its number of slots, or an even share if it gives none.
///
/// # Errors
///
/// [`LauncherError::Slots`] if the hosts take fewer than `ranks`.
pub fn spread(hosts: &[Host], ranks: usize) -> Result<Vec<(String, usize)>, LauncherError> {
    let even = ranks.div_ceil(hosts.len());
    let mut left = ranks;
    let mut spread = Vec::new();
    for host in hosts {
        let take = host.slots.unwrap_or(even).min(left);
        if take > 0 {
            spread.push((host.name.clone(), take));
        }
        left -= take;
    }
    match left {
        0 => Ok(spread),
        _ => Err(LauncherError::Slots { ranks, slots: ranks - left }),
    }
}

/// Returns the total number of slots, or `None` if any host gives none.
pub fn slots(hosts: &[Host]) -> Option<usize> {
    hosts.iter().map(|host| host.slots).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_are_read() {
        let hosts = parse_hosts("# two\nnode1 slots=2 max_slots=4\n\n10.0.0.2:3 # the other\nfe80::1\n").unwrap();
        let host = |name: &str, slots| Host { name: name.into(), slots };
        assert_eq!(hosts, [host("node1", Some(2)), host("10.0.0.2", Some(3)), host("fe80::1", None)]);
        assert_eq!(slots(&hosts), None);
        assert_eq!(slots(&hosts[..2]), Some(5));
    }

    #[test]
    fn what_is_no_list_is_told_with_its_line() {
        for (text, line) in [("", 1), ("a\nb slots=0", 2), ("a cores=2", 1), ("a:x", 1), ("a\n\na", 3), (":2", 1)] {
            match parse_hosts(text) {
                Err(LauncherError::Hosts { line: told, .. }) => assert_eq!(told, line, "{text:?}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn ranks_fill_slots_in_order_or_spread_evenly() {
        let hosts = parse_hosts("a:2\nb:4").unwrap();
        let pairs = |ranks| spread(&hosts, ranks).unwrap();
        assert_eq!(pairs(1), [("a".to_string(), 1)]);
        assert_eq!(pairs(5), [("a".to_string(), 2), ("b".to_string(), 3)]);
        assert!(matches!(spread(&hosts, 7), Err(LauncherError::Slots { ranks: 7, slots: 6 })));
        let open = parse_hosts("a\nb").unwrap();
        assert_eq!(spread(&open, 3).unwrap(), [("a".to_string(), 2), ("b".to_string(), 1)]);
    }
}
