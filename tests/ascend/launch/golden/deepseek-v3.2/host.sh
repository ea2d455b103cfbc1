#!/bin/sh
# As root on each node, once and after each change of the kernel.
set -eu
install -m 644 "$(dirname "$0")/90-banyan.conf" /etc/sysctl.d/90-banyan.conf
mkdir -p /var/cache/banyan
put() {
  if [ -w "$2" ]; then echo "$1" > "$2" && echo "$2 = $1"; else echo "$2 is not here"; fi
}
put 0 /proc/sys/vm/swappiness
put 0 /proc/sys/kernel/numa_balancing
cost=/proc/sys/kernel/sched_migration_cost_ns
[ -e "$cost" ] || cost=/sys/kernel/debug/sched/migration_cost_ns
put 50000 "$cost"
for file in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do
  put performance "$file"
done
