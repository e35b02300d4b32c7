{{- define "ropeway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "ropeway.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "ropeway.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "ropeway.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change, by component. (dict "root" $ "component" "gateway" ["pool" key]) */}}
{{- define "ropeway.selector" -}}
app.kubernetes.io/name: {{ include "ropeway.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
ropeway/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "ropeway.labels" -}}
{{ include "ropeway.selector" . }}
app.kubernetes.io/part-of: ropeway
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "ropeway.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ropeway.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "ropeway.authSecret" -}}
{{- default (printf "%s-auth" (include "ropeway.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "ropeway.redisBundled" -}}
{{- if not (or .Values.redis.existingSecret .Values.redis.url) -}}true{{- end -}}
{{- end -}}

{{- define "ropeway.redisSecret" -}}
{{- default (printf "%s-redis" (include "ropeway.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}

{{/* (dict "image" image "tag" default) */}}
{{- define "ropeway.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A pool's values over the defaults, with what follows from its key. (dict "root" $ "key" key "pool" values) */}}
{{- define "ropeway.pool" -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy (default dict .pool)) -}}
{{- $scaling := $pool.scaling -}}
{{- if and $scaling.enabled $scaling.external -}}
{{- fail (printf "pools.%s.scaling: external is for an autoscaler of your own, with enabled: false" .key) -}}
{{- end -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "pools.%s.scaling: minReplicas is above maxReplicas" .key) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" $scaling.idleReplicas)) (lt (int $scaling.minReplicas) 1) -}}
{{- fail (printf "pools.%s.scaling: idleReplicas needs a minReplicas above it" .key) -}}
{{- end -}}
{{- if and $scaling.enabled (eq $scaling.trigger "prometheus") (not .root.Values.prometheus.serverAddress) -}}
{{- fail (printf "pools.%s.scaling: the trigger prometheus needs prometheus.serverAddress" .key) -}}
{{- end -}}
{{- if and $pool.lora.enabled (not (or .root.Values.adapterStore.url .root.Values.adapterStore.existingClaim)) -}}
{{- fail (printf "pools.%s.lora: a store that all can read is needed, adapterStore.url or adapterStore.existingClaim" .key) -}}
{{- end -}}
{{- if not $pool.pool }}{{- $_ := set $pool "pool" .key -}}{{- end -}}
{{- if not $pool.model }}{{- $_ := set $pool "model" .key -}}{{- end -}}
{{- $pool | toYaml -}}
{{- end -}}

{{/* What clients ask for, of every pool, as a JSON list. */}}
{{- define "ropeway.poolNames" -}}
{{- $names := list -}}
{{- range $key, $values := .Values.pools -}}
{{- $names = append $names (include "ropeway.pool" (dict "root" $ "key" $key "pool" $values) | fromYaml).pool -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) }}{{- fail "pools: two of them have the same name" -}}{{- end -}}
{{- $names | sortAlpha | toJson -}}
{{- end -}}
