#!/usr/bin/env bash
# flower-superlink and flower-supernode of Flower 1.35 to 1.39 with the options that NVFlare 2.9 gives them.
# Flower has one address for all its HTTP APIs since 1.35. "make nvflare" puts this file in the place of both programs.
name=$(basename "$0") options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --serverappio-api-address) shift ;;
    --control-api-address | --clientappio-api-address) options+=(--host "${2%:*}" --port "${2##*:}") && shift ;;
    *) options+=("$1") ;;
  esac
  shift
done
program=${name//-/_}
exec "$(dirname "$0")/python" -c "from flwr.${name#flower-}.cli import $program; $program()" "${options[@]}"
