#!/bin/sh
# Hosts to try sshfleet with: OpenSSH servers of this computer, each on a port of
# the loopback and with a home directory of its own. They need no privileges.
#
#   ./playground.sh start 4     starts four and writes playground/hosts.yaml
#   ./playground.sh stop        stops them and removes playground
#
# The first port is $PORT, by default 2201.
set -eu
cd "$(dirname "$0")"
dir=$PWD/playground

start() {
	sshd=$(PATH=$PATH:/usr/sbin command -v sshd) || {
		echo "sshd is missing: install openssh-server" >&2
		exit 1
	}
	[ "$(id -u)" -ne 0 ] || mkdir -p /run/sshd # where it wants to be when it is root
	mkdir "$dir"
	chmod 700 "$dir"
	ssh-keygen -q -t ed25519 -N "" -C playground -f "$dir/key"
	echo "knownHosts: known_hosts" >"$dir/hosts.yaml"
	echo "hosts:" >>"$dir/hosts.yaml"
	i=1
	while [ "$i" -le "$1" ]; do
		port=$((${PORT:-2201} + i - 1))
		disk=fast
		[ "$i" -lt 4 ] || disk=slow
		host=$dir/host$i
		mkdir -p "$host/home"
		ssh-keygen -q -t ed25519 -N "" -C "host$i" -f "$host/host_key"
		# A path of its own, with the agent in it: sshfleet is "installed" there.
		cat >"$host/sshd_config" <<-END
			ListenAddress 127.0.0.1:$port
			HostKey $host/host_key
			AuthorizedKeysFile $dir/key.pub
			PidFile $host/pid
			StrictModes no
			UsePAM no
			PasswordAuthentication no
			KbdInteractiveAuthentication no
			SetEnv HOME=$host/home PATH=$PWD:/usr/local/bin:/usr/bin:/bin
		END
		"$sshd" -f "$host/sshd_config" -E "$host/log"
		tries=0
		until [ -s "$host/pid" ]; do # which it writes once it listens
			tries=$((tries + 1))
			if [ "$tries" -gt 100 ]; then
				cat "$host/log" >&2
				exit 1
			fi
			sleep 0.1
		done
		echo "[127.0.0.1]:$port $(cut -d " " -f 1,2 "$host/host_key.pub")" >>"$dir/known_hosts"
		cat >>"$dir/hosts.yaml" <<-END
			  - name: host$i
			    host: 127.0.0.1
			    port: $port
			    user: $(id -un)
			    key: key
			    labels: {disk: $disk}
		END
		i=$((i + 1))
	done
}

stop() {
	for pid in "$dir"/host*/pid; do
		[ ! -s "$pid" ] || kill "$(cat "$pid")" || true # it may be gone
	done
	rm -rf "$dir"
}

case ${1:-} in
start) start "${2:-4}" ;;
stop) stop ;;
*)
	sed -n 's/^# \{0,1\}//; 2,8p' "$0" >&2
	exit 2
	;;
esac
